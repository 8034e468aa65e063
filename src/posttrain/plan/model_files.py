"""Checks of the files in a model's folder: settings that are no JSON, weights and tokenizers cut short. Nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.libraries.git_lfs import without_git_lfs
from posttrain.libraries.hub_names import model_name
from posttrain.plan.model_shape import COUNTS

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Objects of settings. transformers ignores some of them where they cannot be read: the tokens that end a response would be lost.
MODEL_SETTINGS = ("config.json", "generation_config.json")
TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
COPY_AGAIN = "copy the model again"
LENGTH_BYTES = 8  # at the beginning of a safetensors file: the length of its header


def holds_model(folder: Path) -> bool:
    """Return True when a folder has a model's configuration."""
    return (folder / "config.json").is_file()


def is_hub_id(path: str) -> bool:
    """Return True when a model's name means the hub: it has the form ``name`` or ``org/name``, with a revision or without, and is
    no local folder."""
    return model_name(path) is not None


def check_model(path: str, field: str, *, tokenizer: bool) -> Iterator[Problem]:
    if is_hub_id(path):
        return
    folder = Path(path)
    if not folder.is_dir():
        what = f"{path} is a file, and a model is a folder" if folder.exists() else f"there is no folder {path}"
        yield Problem(what, fix="name a Hugging Face model folder, or a hub id such as org/name", field=field)
        return
    if not holds_model(folder):
        what = f"{folder} holds no config.json, so it is not a Hugging Face model folder"
        inside = sorted(file.parent for file in folder.glob("*/config.json"))
        fix = f"did you mean {inside[0]}?" if inside else "name a folder that holds one, or a hub id such as org/name"
        yield Problem(what, fix=fix, field=field)
        return
    yield from _setting_problems(folder, MODEL_SETTINGS, field)
    yield from _count_problems(folder / "config.json", field)
    yield from _weight_problems(folder, field)
    if tokenizer:
        yield from check_tokenizer(folder, field)


def check_tokenizer(folder: Path, field: str) -> Iterator[Problem]:
    if not folder.is_dir():
        yield Problem(f"there is no folder {folder}", field=field)
    elif not any((folder / name).is_file() for name in TOKENIZER_FILES):
        fix = "add one"
        if field == "model.path":
            fix += ", or name another folder with model.tokenizer_path"
        yield Problem(f"{folder} holds no tokenizer ({' or '.join(TOKENIZER_FILES)})", fix=fix, field=field)
    else:
        yield from _setting_problems(folder, TOKENIZER_SETTINGS, field)
        yield from _tokenizer_problems(folder, field)


def settings(file: Path) -> dict[str, Any] | None:
    """Return a JSON file's object; None where the file is missing or holds none, which ``check_model`` reports."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _setting_problems(folder: Path, names: Iterable[str], field: str) -> Iterator[Problem]:
    for file in (folder / name for name in names):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except IsADirectoryError:
            yield Problem(f"{file} is a folder, and a file of settings has this name", fix=COPY_AGAIN, field=field)
        except ValueError as error:
            yield Problem(f"{file} is not valid JSON: {error}", fix=COPY_AGAIN, field=field)
        else:
            if not isinstance(found, dict):
                what = f"{file} is to hold an object ({{...}}), and holds {json.dumps(found)[:40]}"
                yield Problem(what, fix=COPY_AGAIN, field=field)


def _count_problems(file: Path, field: str) -> Iterator[Problem]:
    """Report sizes in a configuration that are no numbers of at least 1. (Lists, one number per layer, are some kinds' own.)"""
    whole = settings(file) or {}
    text = whole.get("text_config")
    at, sizes = ("text_config.", text) if isinstance(text, dict) else ("", whole)
    for name in COUNTS:
        found = sizes.get(name)
        if found is not None and not isinstance(found, list) and (type(found) is not int or found < 1):
            what = f"{at}{name} in {file} is {json.dumps(found)[:40]}, and must be a whole number of at least 1"
            yield Problem(what, fix=COPY_AGAIN, field=field)


def _weight_problems(folder: Path, field: str) -> Iterator[Problem]:
    """Report weights that are missing, pickled, in the parts of a run's processes, or cut short."""
    if fix := without_git_lfs(str(folder)):
        yield Problem(f"no model could be loaded from {folder}", fix=fix, field=field)
        return
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield Problem(f"{index} cannot be read: {error}", fix=COPY_AGAIN, field=field)
            return
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            what = f"{folder} lacks {len(missing)} of {len(shards)} weight files ({missing[0]} is the first)"
            yield Problem(what, fix=COPY_AGAIN, field=field)
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
        if not file.is_file():
            continue
        size, wanted = file.stat().st_size, _size_by_header(file)
        if wanted is not None and size < wanted:
            what = f"{file} is cut short: it has {size:,} of {wanted:,} bytes" if size else f"{file} is empty"
            yield Problem(what, fix=COPY_AGAIN, field=field)
            return


def _size_by_header(file: Path) -> int | None:
    """Return the bytes that a safetensors file needs for its tensors, as its header says; None for a header that says nothing."""
    with file.open("rb") as opened:
        first = opened.read(LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        if LENGTH_BYTES + length > file.stat().st_size:
            return LENGTH_BYTES + length
        try:
            header = json.loads(opened.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            return LENGTH_BYTES + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None  # loading it reports the header


def _tokenizer_problems(folder: Path, field: str) -> Iterator[Problem]:
    """Report a tokenizer file that was cut short. (A whole one has megabytes, so it is not parsed here.)"""
    file = folder / "tokenizer.json"
    if file.is_file():
        text = file.read_bytes().strip()
        if not (text.startswith(b"{") and text.endswith(b"}")):
            yield Problem(f"{file} is not JSON: it may have been cut short", fix=COPY_AGAIN, field=field)


def has_chat_template(folder: Path) -> bool:
    """Return True when a tokenizer's folder holds a chat template, in a file of its own or in its configuration."""
    files = (folder / name for name in ("chat_template.jinja", "chat_template.json"))
    if any(file.is_file() and file.stat().st_size for file in files):
        return True
    return bool((settings(folder / "tokenizer_config.json") or {}).get("chat_template"))
