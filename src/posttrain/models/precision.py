"""Weights of a Hugging Face folder in another precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from posttrain.errors import ModelError, Problem

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMED_IN_CONFIG = ("dtype", "torch_dtype")


def convert_weights(folder: Path, name: str) -> None:
    """Round every floating-point weight in ``folder`` to the dtype of this name, a file at a time, and name it in config.json.

    Raises: ModelError for a weight that float16 cannot hold.
    """
    dtype = DTYPES[name]
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for key, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[key] = tensor.to(dtype)
                if not tensors[key].isfinite().all() and tensor.isfinite().all():
                    what = f"{key} holds {float(tensor.abs().max()):g}, which {name} cannot"
                    raise ModelError(Problem(what, fix="use --dtype bfloat16"))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        save_file(tensors, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        tree = json.loads(index.read_text(encoding="utf-8"))
        tree.setdefault("metadata", {})["total_size"] = total
        index.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    config = folder / "config.json"
    config.write_text(
        json.dumps(_with_dtype(json.loads(config.read_text(encoding="utf-8")), name), indent=2) + "\n", encoding="utf-8"
    )


def _with_dtype(node: Any, name: str) -> Any:
    """The configuration of a model and of its parts with their dtypes replaced."""
    if isinstance(node, dict):
        return {
            key: name if key in NAMED_IN_CONFIG and value in DTYPES else _with_dtype(value, name)
            for key, value in node.items()
        }
    return node
