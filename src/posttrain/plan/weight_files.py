"""Files of a model folder, checked by their first bytes and their sizes: finds a copy that was cut short."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from posttrain.errors import Problem
from posttrain.libraries.git_lfs import without_git_lfs

LENGTH_BYTES = 8  # at the beginning of a safetensors file: the length of its header


def weight_problems(folder: Path, field: str) -> Iterator[Problem]:
    """Report weights that are missing, pickled, in the parts of a run's processes, or cut short."""
    if fix := without_git_lfs(str(folder)):
        yield Problem(f"no model could be loaded from {folder}", fix=fix, field=field)
        return
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield Problem(f"{index} cannot be read: {error}", fix="copy the model again", field=field)
            return
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            what = f"{folder} lacks {len(missing)} of {len(shards)} weight files ({missing[0]} is the first)"
            yield Problem(what, fix="copy the model again", field=field)
        yield from _cut_short(sorted(folder / name for name in shards if name not in missing), field)
    elif any(folder.glob("weights/shard-*.safetensors")):
        what = f"the weights in {folder} are in the parts that the processes of a run have written"
        fix = f"posttrain export {folder.parent} OUT_DIR puts them together; then {field}=OUT_DIR"
        yield Problem(what, fix=fix, field=field)
    elif not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        what = f"{folder} holds no weights (*.safetensors)"
        fix = "its pickled weights are not loaded; save them again as safetensors" if pickled else ""
        yield Problem(what, fix=fix, field=field)
    else:
        yield from _cut_short([folder / "model.safetensors"], field)


def _cut_short(files: list[Path], field: str) -> Iterator[Problem]:
    """Report the first file that is shorter than its header says."""
    for file in files:
        size = file.stat().st_size if file.is_file() else 0
        wanted = _size_by_header(file) if size else None
        if wanted is not None and size < wanted:
            what = f"{file} is cut short: it has {size:,} of {wanted:,} bytes"
            yield Problem(what, fix="copy the model again", field=field)
            return


def _size_by_header(file: Path) -> int | None:
    """Return the bytes that a safetensors file needs for its tensors, as its header says; None for a header that says nothing."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if length > file.stat().st_size:
            return LENGTH_BYTES + length
        try:
            header = json.loads(opened.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            return LENGTH_BYTES + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None  # loading it reports the header


def tokenizer_problems(folder: Path, field: str) -> Iterator[Problem]:
    """Report a tokenizer file that was cut short. (A whole one has megabytes, so it is not parsed here.)"""
    file = folder / "tokenizer.json"
    if file.is_file():
        text = file.read_bytes().strip()
        if not (text.startswith(b"{") and text.endswith(b"}")):
            yield Problem(f"{file} is not JSON: it may have been cut short", fix="copy the model again", field=field)


def has_chat_template(folder: Path) -> bool:
    """Return True when a tokenizer's folder holds a chat template, in a file of its own or in its configuration."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))
