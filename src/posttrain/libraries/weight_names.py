"""Names of the weights in a model folder, from the headers of its safetensors files; the names of score heads among them."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

LENGTH_BYTES = 8  # at the beginning of a safetensors file: the length of its header
# Heads of one number in other libraries' checkpoints: OpenRLHF's value_head, TRL's and verl's v_head.summary.
SCORE_HEAD = re.compile(r"^(score|classifier|value_head|reward_head|v_head\.summary|v_head)\.weight$")
# All weights of a head, also of one with several layers (score.0, score.2 of Qwen's reward models).
OF_A_HEAD = re.compile(r"^(score|classifier|value_head|reward_head|v_head)\.")


def weight_names(folder: str) -> set[str]:
    """Return the names of all weights; empty where the folder or its files cannot be read, which loading it reports."""
    place = Path(folder).expanduser()
    try:
        index = place / "model.safetensors.index.json"
        if index.is_file():
            return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        return {name for file in place.glob("*.safetensors") for name in _header(file) if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def score_head_in(folder: str) -> str | None:
    """Return the name of the score head among the weights, whatever the folder's configuration calls the model; None without."""
    found = (SCORE_HEAD.match(name) for name in sorted(weight_names(folder)))
    return next((match[1] for match in found if match), None)


def score_labels_in(folder: str) -> int | None:
    """Return the number of labels of the score head among the weights; None without one, or where its file cannot be read."""
    for file in sorted(Path(folder).expanduser().glob("*.safetensors")):
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            header = _header(file)
            for name in sorted(filter(SCORE_HEAD.match, header)):
                return int(header[name]["shape"][0])
    return None


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if length > file.stat().st_size:
            raise ValueError("the header is longer than the file")
        return dict(json.loads(opened.read(length)))
