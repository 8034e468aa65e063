"""One update of the policy as the benchmarks make it: the engine, its batches and their arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import random_batch
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel

from posttrain.backends.torch_training.sharding import Sharding
from posttrain.config.lora import LoraConfig
from posttrain.config.model import ModelConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.libraries.cpu_kernels.load import allow_kernels
from posttrain.models.cpu_products import choose_float32_products
from posttrain.models.fused_layers import fuse_layers
from posttrain.models.loading import DTYPES, load_causal_lm, load_tokenizer
from posttrain.models.lora import add_adapter
from posttrain.models.wide_products import widen_products
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan
from posttrain.registry import TRAIN_ENGINES

Way = dict[str, Any]
PPO_CLIP = LossPlan(
    name="ppo_clip",
    parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    aggregation="token_mean",
    temperature=1.0,
)


def make_engine(way: Way) -> tuple[Any, PreTrainedModel]:
    """The local engine and its model, one way: path, micro, and any of dtype, master_dtype, device, lora, max_tokens,
    whole_logits, padded, share_prompts, gradient_checkpointing, compile_layers, plain_layers (as transformers has them),
    without_kernels (of the update), every_backward (also where gradients are 0)."""
    allow_kernels(not way.get("without_kernels"))
    device = torch.device(way.get("device", "cpu"))
    if device.type == "cpu":
        choose_float32_products()
    model = load_causal_lm(way["path"], dtype=DTYPES[way.get("dtype", "bfloat16")], device=device)
    if device.type == "cpu" and not way.get("plain_layers") and not way.get("compile_layers"):
        fuse_layers(model)
        widen_products(model)
    if rank := way.get("lora"):
        add_adapter(model, LoraConfig(rank=rank))
    how = {
        name: way[name]
        for name in ("padded", "share_prompts", "gradient_checkpointing", "compile_layers")
        if name in way
    }
    if way.get("every_backward"):
        how["sharding"] = Sharding()
        how["sharding"].skips_backward = False
    engine = TRAIN_ENGINES.get("local")(
        model,
        load_tokenizer(ModelConfig(path=way["path"])),
        optimizer=OptimizerConfig(lr=1e-9),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=way["micro"],
        max_tokens_per_micro_batch=way.get("max_tokens"),
        sequences_per_scoring_batch=way["micro"],
        master_dtype=DTYPES[way.get("master_dtype", "float32")],
        **how,
    )
    if way.get("whole_logits"):
        engine._scorer.head = "asked for by the benchmark"
    return engine, model


def ragged_batch(sequences: int, vocabulary: int) -> TrainBatch:
    """Prompts of 32 tokens and responses of log-normal lengths: median 48, sigma 0.8, at most 512; a group each."""
    generator = torch.Generator().manual_seed(0)
    lengths = (48 * (0.8 * torch.randn(sequences, generator=generator)).exp()).long().clamp(1, 512)
    batch = random_batch(sequences, 1, 32, int(lengths.max()), vocabulary)
    mask = torch.arange(batch.loss_mask.shape[1]) < lengths[:, None]
    return with_mask(batch, mask)


def groups_batch(vocabulary: int, groups: int = 8) -> TrainBatch:
    """Prompts of 256 tokens with 8 responses of 64 tokens each."""
    batch = random_batch(groups, 8, 256, 64, vocabulary)
    return with_mask(batch, torch.ones_like(batch.loss_mask))


def with_mask(batch: TrainBatch, mask: torch.Tensor) -> TrainBatch:
    advantages = torch.randn(len(mask), 1, generator=torch.Generator().manual_seed(1)) * mask
    sequences = replace(batch.sequences, response_mask=mask)
    return replace(batch, sequences=sequences, advantages=advantages, loss_mask=mask)


def flops(model: Any, batch: TrainBatch) -> float:
    """Of the matrix products that an update needs, with prompts computed once: 2 per weight and token forward, twice that
    backward, the head on scored tokens only. Attention's products and the tiles of the head that are multiplied once more
    in the backward pass, because they were not kept, are left out."""
    head = model.get_output_embeddings().weight.numel()
    body = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n
    )
    sequences = batch.sequences
    prompts = {int(g): int(n) for g, n in zip(sequences.group_index, sequences.prompt_lengths, strict=True)}
    tokens = sum(prompts.values()) + int(sequences.response_lengths.sum())
    return 6.0 * (body * tokens + head * int(sequences.response_mask.sum()))


def matrix_peak(config: PreTrainedConfig, dtype: torch.dtype, device: str = "cpu", tokens: int = 2048) -> float:
    """FLOP/s of the widest product of a layer, ``tokens`` at a time: the best of 20."""
    shape = config.get_text_config()
    left = torch.randn(tokens, shape.hidden_size, device=device, dtype=dtype)
    right = torch.randn(shape.intermediate_size, shape.hidden_size, device=device, dtype=dtype)
    return 2.0 * left.shape[0] * right.numel() / min(timed(lambda: linear(left, right), device) for _ in range(20))


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds until the work is done, on the device too."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
