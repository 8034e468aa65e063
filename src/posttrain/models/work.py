"""Cost of a model's update, and the measured speed of a device's arithmetic."""

from __future__ import annotations

import time

import torch
from transformers import PreTrainedModel

from posttrain.records.work import Work

SIZES = {"cpu": 768, "cuda": 8192}  # of the square matrices whose product is timed
TRIES = 3  # the best one counts; about 10 ms in all on a CPU core


def work_of(model: PreTrainedModel, *, shares_prompts: bool) -> Work | None:
    """Return the cost of an update of this model, and its device's speed; None where 6 operations per token and parameter would
    be wrong: with an adapter (frozen weights have no gradient) and with experts (a token passes through a few of them)."""
    config = model.config.get_text_config()
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if experts or not all(parameter.requires_grad for parameter in model.parameters()):
        return None
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    apart = {id(head), id(embedding)}
    layers = sum(each.numel() for each in model.parameters() if each.ndim >= 2 and id(each) not in apart)
    return Work(
        layer_parameters=layers,
        head_parameters=head.numel(),
        flops_per_s=matrix_flops_per_s(head.device, head.dtype),
        shares_prompts=shares_prompts,
    )


def matrix_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of a product of two large matrices, as the best of a few tries."""
    size = SIZES.get(device.type, SIZES["cpu"])
    one = torch.ones(size, size, device=device, dtype=dtype)
    best = 0.0
    for _ in range(TRIES + 1):  # the first warms up
        start = time.perf_counter()
        product = one @ one
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
        del product
    return best
