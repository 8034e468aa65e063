"""Find how a run fits into the memory of one device: method, recomputation, micro-batch and length of responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from posttrain.config import RunConfig
from posttrain.config.lora import LoraConfig
from posttrain.plan.batch import plan_batches
from posttrain.plan.estimate import estimate, peak
from posttrain.plan.positions import model_positions
from posttrain.plan.roles import place
from posttrain.plan.rounding import unroundable

GIB = 2**30
# Left for the runtime, fragments and buffers: of the memory that was named
RESERVE = 0.1
RANK = 16
MAX_LENGTH = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One method, and the largest sizes with which its fullest moment stays within the memory."""

    method: str
    overrides: tuple[str, ...]  # that make the method of the configuration
    smallest: int  # bytes, with one sequence per micro-batch and one being sampled
    sequences: int | None = None  # per micro-batch, at the configured lengths; None: not even one fits
    sampled: int | None = None  # sequences that are sampled at the same time, beside that
    response_tokens: int | None = None  # the longest response with one sequence per micro-batch

    @property
    def settings(self) -> tuple[str, ...]:
        """Overrides of a configuration that fits; empty when none does."""
        if self.sequences is None:
            return ()
        return (
            *self.overrides,
            "policy.max_tokens_per_micro_batch=null",
            f"policy.sequences_per_micro_batch_per_device={self.sequences}",
            f"rollout.max_concurrent_sequences={self.sampled}",
        )


def fits(config: RunConfig, gib: float) -> list[Fit] | None:
    """Try every method on one device with ``gib`` of memory; None when the model's shape is not known (a hub id)."""
    found = [_fit(config, method, overrides, changed, gib) for method, overrides, changed in _methods(config)]
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else None


def _methods(config: RunConfig) -> Iterator[tuple[str, tuple[str, ...], RunConfig]]:
    """The ways to train, the most exact first, with the overrides and the configuration of each."""
    adapter = config.policy.lora or LoraConfig(rank=RANK)
    quantized = adapter.model_copy(update={"quantize": adapter.quantize or "nf4"})
    plain = adapter.model_copy(update={"quantize": None})
    engine, rounded = config.rollout.engine, f"QLoRA ({quantized.quantize}), rank {adapter.rank}"
    found: list[tuple[str, LoraConfig | None, str, str]] = [
        ("all weights, float32 masters", None, "float32", engine),
        ("all weights, bfloat16 masters", None, "bfloat16", engine),
        (f"LoRA, rank {adapter.rank}", plain, "float32", engine),
        (rounded, quantized, "float32", engine),
    ]
    if unroundable(config.model.path):
        found.pop()
    elif engine == "native":
        # The native sampler unpacks the base, so with it QLoRA needs no less than LoRA
        found.append((f"{rounded}, hf samples", quantized, "float32", "hf"))
    for name, lora, masters, sampler in found:
        for recompute in (False, True):
            model = {"master_dtype": masters, "gradient_checkpointing": recompute, "compute_dtype": "bfloat16"}
            changed = config.model_copy(
                update={
                    "model": config.model.model_copy(update=model),
                    "rollout": config.rollout.model_copy(update={"engine": sampler}),
                    "policy": config.policy.model_copy(update={"lora": lora, "max_tokens_per_micro_batch": None}),
                }
            )
            words = ["model.compute_dtype=bfloat16", f"model.master_dtype={masters}"]
            words += [f"model.gradient_checkpointing={str(recompute).lower()}"]
            words += [f"policy.lora.rank={adapter.rank}"] if lora else ["policy.lora=null"]
            words += [f"policy.lora.quantize={lora.quantize}"] if lora and lora.quantize else []
            words += [f"rollout.engine={sampler}"] if sampler != engine else []
            yield f"{name}{', recomputed activations' if recompute else ''}", tuple(words), changed


def _fit(config: RunConfig, method: str, overrides: tuple[str, ...], changed: RunConfig, gib: float) -> Fit | None:
    limit = gib * GIB * (1 - RESERVE)

    def used(sequences: int, sampled: int, response: int) -> int | None:
        return _bytes(changed, sequences, sampled, response)

    def within(sequences: int, sampled: int, response: int) -> bool:
        found = used(sequences, sampled, response)
        return found is not None and found <= limit

    response, wanted = config.rollout.max_response_tokens, config.rollout.max_concurrent_sequences
    smallest = used(1, 1, response)
    if smallest is None:
        return None
    if smallest > limit:
        return Fit(method=method, overrides=overrides, smallest=smallest)
    sampled = _largest(lambda count: within(1, count, response), wanted)
    step = config.data.prompts_per_step * config.rollout.samples_per_prompt
    update = config.policy.sequences_per_mini_batch or step
    sequences = max(count for count in _divisors(update) if count == 1 or within(count, sampled, response))
    positions = model_positions(config) or MAX_LENGTH
    longest = _largest(lambda tokens: within(1, 1, tokens), max(response, positions - config.data.max_prompt_tokens))
    return Fit(
        method=method,
        overrides=overrides,
        smallest=smallest,
        sequences=sequences,
        sampled=sampled,
        response_tokens=longest,
    )


def _divisors(number: int) -> list[int]:
    """The sizes of micro-batches that divide a mini-batch."""
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return sorted({*small, *(number // count for count in small)})


def _largest(works: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that works, where 1 does and every smaller one than a working one does."""
    low, high = 1, max(limit, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low


def _bytes(config: RunConfig, sequences: int, sampled: int, response: int) -> int | None:
    """The fullest moment of one device; None when the model's shape is not known."""
    policy = config.policy.model_copy(update={"sequences_per_micro_batch_per_device": sequences})
    rollout = config.rollout.model_copy(update={"max_concurrent_sequences": sampled, "max_response_tokens": response})
    tried = config.model_copy(update={"policy": policy, "rollout": rollout})
    placement, _ = place(tried)
    # Micro-batches that divide the step are chosen afterwards: here one of every size is priced
    batches, _ = plan_batches(config, None)
    if placement is None or batches is None:
        return None
    priced = replace(batches, sequences_per_micro_batch_per_device=sequences)
    # Memory that somebody names is an accelerator's, unless the configuration says otherwise
    memory = estimate(tried, priced, placement, on_cpu=placement.device == "cpu")
    return None if memory is None else peak(placement, memory).bytes
