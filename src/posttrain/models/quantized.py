"""Base weights in 4 bits under an adapter (QLoRA, arXiv:2305.14314), by bitsandbytes, on a CPU and on CUDA.

Every linear layer but the output layer is stored in blocks of 64 weights of 4 bits with a scale each, and multiplied by
in the compute dtype. Samplers and exports read the rounded weights with the adapter added, so they have the trained model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.config.lora import LoraConfig
from posttrain.errors import MissingDependency, ModelError, Problem
from posttrain.models.vision import vision_parts
from posttrain.registry import missing_library

BLOCK = 64  # weights that share a scale
FILE = "base_quantization.json"  # beside a saved adapter: how its base was rounded


def quantize_base(model: PreTrainedModel, config: LoraConfig, *, head: str | None, field: str) -> None:
    """Store the linear layers of ``model`` in 4 bits, in place and on their device, but the output layer, ``head`` and vision.

    Raises: MissingDependency without bitsandbytes; ModelError for a model with experts, whose weights are no linear layers, or
        with a layer whose inputs are no whole blocks: bitsandbytes 0.50 restores such weights wrongly on a CPU.
    """
    bnb = _bitsandbytes(field)
    chosen = list(_linear_layers(model, head))
    if any(weight.dim() == 3 for weight in model.parameters()):
        what = (
            f"the experts of {model.name_or_path} are stacks of matrices, which bitsandbytes does not round to 4 bits"
        )
        raise ModelError(Problem(what, fix=f"leave {field}.quantize out", field=f"{field}.quantize"))
    for name, linear in chosen:
        if linear.in_features % BLOCK:
            what = (
                f"{name} of {model.name_or_path} has {linear.in_features} inputs, which are no whole blocks of {BLOCK}"
            )
            raise ModelError(Problem(what, fix=f"leave {field}.quantize out", field=f"{field}.quantize"))
    for name, linear in chosen:
        weight = linear.weight
        layer = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=weight.dtype,
            compress_statistics=config.quantize_scales,
            quant_type=config.quantize,
            device="meta",
        )
        layer.weight = bnb.nn.Params4bit(
            weight.data,
            requires_grad=False,
            blocksize=BLOCK,
            compress_statistics=config.quantize_scales,
            quant_type=config.quantize,
            module=layer,
        )
        layer.bias = linear.bias
        # bitsandbytes 0.50 would repack the weights at the first pass without gradient, for a CPU kernel that takes only
        # matrices wider than a block and that no other reader of the weights knows.
        layer.support_avx512bf16_for_cpu = False
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.to(weight.device))
    adapted: Any = model
    adapted.is_loaded_in_4bit = True  # so that peft chooses its layer for 4-bit weights


def is_quantized(model: nn.Module) -> bool:
    """Return True when a model has 4-bit layers."""
    return any(_state_of(module) is not None for module in model.modules())


def plain_weight(module: Any) -> Tensor:
    """Return the weight that a linear layer multiplies by: its own tensor, or of a 4-bit layer a copy in the compute dtype."""
    state = _state_of(module)
    if state is None:
        weight: Tensor = module.weight
        return weight.detach()
    return _dequantized(module.weight.data, state)


@torch.no_grad()
def plain_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with plain weights in the place of 4-bit ones and their scales."""
    layers = {name: module for name, module in model.named_modules() if _state_of(module) is not None}
    plain = {}
    for name, tensor in state.items():
        owner, _, rest = name.partition(".weight")
        if owner in layers and name.startswith(f"{owner}.weight"):
            if not rest:
                plain[name] = plain_weight(layers[owner])
        else:
            plain[name] = tensor
    return plain


def weight_count(weight: nn.Parameter) -> int:
    """Count the weights of a parameter; two of 4 bits share a byte."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else int(torch.Size(state.shape).numel())


def settings_of(model: nn.Module) -> str | None:
    """Return the text of ``FILE`` for a model; None when nothing is in 4 bits."""
    states = (_state_of(module) for module in model.modules())
    state = next((each for each in states if each is not None), None)
    if state is None:
        return None
    dtype = str(state.dtype).removeprefix("torch.")
    return json.dumps(
        {"kind": state.quant_type, "scales": bool(state.nested), "block": state.blocksize, "dtype": dtype}
    )


@torch.no_grad()
def round_like(model: PreTrainedModel, folder: Path, *, head: str | None) -> None:
    """Round the linear layers of a float32 base as the adapter in ``folder`` had them, which was trained on the rounded ones;
    a no-op for an adapter on plain weights."""
    file = folder / FILE
    if not file.is_file():
        return
    how = json.loads(file.read_text(encoding="utf-8"))
    functional = _bitsandbytes(str(file)).functional
    for _, linear in _linear_layers(model, head):
        weight = linear.weight.to(getattr(torch, how["dtype"]))
        packed, state = functional.quantize_4bit(
            weight, blocksize=how["block"], compress_statistics=how["scales"], quant_type=how["kind"]
        )
        linear.weight.copy_(_dequantized(packed, state))


def _dequantized(packed: Tensor, state: Any) -> Tensor:
    functional = _bitsandbytes("policy.lora.quantize").functional
    weight: Tensor = functional.dequantize_4bit(packed, state)
    return weight


def _state_of(module: Any) -> Any:
    return getattr(getattr(module, "weight", None), "quant_state", None)


def _linear_layers(model: PreTrainedModel, head: str | None) -> Iterator[tuple[str, nn.Linear]]:
    outside = [model.get_output_embeddings(), *(model.get_submodule(part) for part in vision_parts(model))]
    left_out = {id(part) for whole in outside if whole is not None for part in whole.modules()}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and id(module) not in left_out and name != head:
            yield name, module


@contextmanager
def without_kernel_notice() -> Iterator[None]:
    """Import bitsandbytes, or peft, which imports it, without its warning on CPUs with AVX-512 that an optional kernel of the hub
    (gemm_4bit_forward) was not loaded: no result depends on it, and ``quantize_base`` never uses it."""
    logger = logging.getLogger("bitsandbytes")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _bitsandbytes(field: str) -> Any:
    try:
        with without_kernel_notice():
            import bitsandbytes
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise MissingDependency(missing_library("bitsandbytes", field)) from error
    return bitsandbytes
