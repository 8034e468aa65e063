"""A low-rank adapter as a GGUF file, which llama.cpp loads over the GGUF of its base model; read back before it counts.

Source: llama.cpp's convention for adapters (general.type adapter, adapter.type lora, adapter.lora.alpha; each weight NAME has
NAME.lora_a [rank, columns] and NAME.lora_b [rows, rank], and adds alpha / rank * lora_b @ lora_a).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from posttrain.errors import ModelError, Problem
from posttrain.models.gguf_layout import Layout
from posttrain.models.gguf_settings import check_family
from posttrain.models.loading import load_model_config
from posttrain.models.lora import CONFIG, WEIGHTS, peft_library, read_config

PREFIX = "base_model.model."
# Settings of an adapter whose sum is not alpha / rank * B @ A, the same for all layers -> the words for them.
UNKNOWN = {
    "use_dora": "DoRA's magnitudes",
    "rank_pattern": "ranks by layer",
    "alpha_pattern": "alphas by layer",
    "lora_bias": "biases of its own",
    "modules_to_save": "layers that are trained whole",
}


def write_adapter_gguf(adapter: Path, model: Path, out: Path) -> int:
    """Write the adapter in a folder of peft's to ``out``, in float32. Args: ``model``, a folder of the same architecture.

    Returns: the number of weights that it changes. Raises: ModelError for an adapter or a model that GGUF does not know, or a
        file that reads otherwise.
    """
    config = load_model_config(str(model))
    check_family(config)
    settings = read_config(peft_library("policy.lora"), str(adapter), "")
    check_settings(settings, adapter)
    layout = Layout(config)
    tensors = dict(_named(name, tensor, layout) for name, tensor in load_file(adapter / WEIGHTS).items())
    alpha = settings.lora_alpha * (math.sqrt(settings.r) if settings.use_rslora else 1.0)
    beside = out.with_name(f".{out.name}.partial")
    writer = gguf.GGUFWriter(beside, gguf.MODEL_ARCH_NAMES[layout.family.architecture])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    writer.add_name(out.stem)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(beside).tensors}
    for name, tensor in tensors.items():
        if name not in found or not np.array_equal(found[name].data.reshape(tensor.shape), tensor.numpy()):
            what = f"{name} in {beside} reads otherwise than it was written"
            raise ModelError(Problem(what, fix="look after that disk"))
    beside.replace(out)
    return len(tensors) // 2


def check_settings(settings: Any, adapter: Path) -> None:
    """Raises: ModelError for an adapter that computes more than llama.cpp's."""
    found = [words for name, words in UNKNOWN.items() if getattr(settings, name, None)]
    if found:
        what = f"the adapter in {adapter} has {', '.join(found)}, which a GGUF adapter cannot express"
        raise ModelError(Problem(what, fix="use the merged model's GGUF file", field="--gguf"))


def _named(name: str, tensor: Tensor, layout: Layout) -> tuple[str, Tensor]:
    """Name and order a tensor of peft's as GGUF does: rows of queries and keys are those of lora_b."""
    base, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
    weight = f"{base}.weight"
    renamed = layout.name(weight)
    if renamed is None or part not in ("lora_A", "lora_B"):
        raise ModelError(Problem(f"a GGUF adapter has no name for the tensor {name}", field="--gguf"))
    if part == "lora_A":
        return f"{renamed}.lora_a", tensor.float().contiguous()
    return f"{renamed}.lora_b", layout.write(weight, tensor.float()).contiguous()


def adapter_of(checkpoint: Path) -> Path | None:
    """The folder of a checkpoint's adapter; None for one without."""
    folder = checkpoint / "policy"
    return folder if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file() else None
