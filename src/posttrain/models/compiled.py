"""torch.compile for the parts of a model where it fuses elementwise work: MLPs and norms."""

from __future__ import annotations

import shutil

import torch
from torch import nn
from transformers import PreTrainedModel

from posttrain.errors import ModelError, Problem


def compile_layers(model: PreTrainedModel) -> int:
    """Compile every MLP and norm of the decoder layers, in place, for any number of tokens. Returns: their count.

    Attention is not compiled: it consists of few large products. Compilation happens at the first pass and takes a while.

    Raises: ModelError when the model has no such layers, or a CPU run has no C++ compiler.
    """
    if model.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        what = "torch.compile on a CPU needs a C++ compiler, and none was found"
        raise ModelError(Problem(what, fix="install g++, or use model.compile=false", field="model.compile"))
    parts = [module for name, module in model.named_modules() if _fuses(name, module)]
    if not parts:
        what = f"{type(model).__name__} has no MLPs or norms that are known to be worth compiling"
        raise ModelError(Problem(what, fix="use model.compile=false", field="model.compile"))
    # All layers of a kind run the same code but are compiled per instance, so the limit must allow as many.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * len(parts))
    for module in parts:
        module.compile(dynamic=True)
    return len(parts)


def _fuses(name: str, module: nn.Module) -> bool:
    last = name.rpartition(".")[2]
    return ".layers." in f".{name}." and (last == "mlp" or last.endswith("norm"))
