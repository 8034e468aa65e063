"""Batch sizes: SkyRL's prompts over all devices, and sequences on one, become our sequences.

The checks are those of its validate_batch_sizes, in its order. Where a mini-batch does not split over the devices, SkyRL of 2025
gives each device the quotient, so that a step has more and smaller updates than its keys say; since April 2026 it pads the
mini-batch with rows that do not count. Both are taken over as far as the step itself splits over the devices.
"""

from __future__ import annotations

import math
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import is_of_2026

_STEP = "trainer.train_batch_size"
_MICRO = "trainer.micro_train_batch_size_per_gpu"
_FORWARD = "trainer.micro_forward_batch_size_per_gpu"
_SAMPLES = "generator.n_samples_per_prompt"


def batches(keys: Reader, copies: dict[str, int], *, has_critic: bool) -> dict[str, Any]:
    """The sizes of updates and micro-batches.

    Args: ``copies`` holds the data-parallel size of the policy, and of critic and reference where the run has them.
    """
    micro = keys[_MICRO]
    fields: dict[str, Any] = {
        "policy.sequences_per_micro_batch_per_device": micro,
        "reference.sequences_per_micro_batch_per_device": keys[_FORWARD],
    }
    for key in (_MICRO, _FORWARD):
        if keys[key] < 1:
            keys.problem(f"{key} must be at least 1, not {keys[key]}", key=key, fix=f"use {key}=1, or more")
    for role, field in (("policy", "policy"), ("critic", "critic")):
        if role not in copies:
            continue
        key = f"trainer.{role}_mini_batch_size"
        if not _fits(keys, key, copies[role]) or not (role == "policy" or has_critic):
            continue
        fields[f"{field}.sequences_per_mini_batch"] = size = _update(keys, key, copies[role])
        if size % copies[role] and not keys.here:
            fields["policy.uneven_shares"] = True
    if has_critic:
        fields["critic.sequences_per_micro_batch_per_device"] = micro
    _check_reference(keys, copies)
    return fields


def _fits(keys: Reader, key: str, copies: int) -> bool:
    """Checks 1 to 11 for one model: the first that fails is reported."""
    prompts, samples, mini, micro = keys[_STEP], keys[_SAMPLES], keys[key], keys[_MICRO]
    if samples < 1 or prompts < 1:  # refused as a RunConfig
        return False
    if prompts < mini:
        keys.problem(
            f"a mini-batch of {mini} prompts is more than the {prompts} of a step ({_STEP})",
            key=key,
            fix=f"use {key}={prompts}, or {_STEP}={mini}",
        )
        return False
    if mini < 1:
        keys.problem(f"{key} must be at least 1, not {mini}", key=key, fix=f"use {key}={prompts}")
        return False
    if prompts % mini:
        fits = [size for size in _divisors(prompts) if not size * samples % copies]
        below, above = _around(fits or _divisors(prompts), mini)
        keys.problem(
            f"{_STEP}={prompts} prompts do not split into mini-batches of {mini} ({prompts} / {mini} = "
            f"{prompts / mini:.4g})",
            key=key,
            fix=f"use {key}={above}" + (f" or {key}={below}" if below != above else ""),
        )
        return False
    if not _splits(keys, key, copies):
        _does_not_split(keys, key, copies)
        return False
    each = mini * samples // copies
    if micro >= 1 and each % micro:
        stride = copies * micro // math.gcd(copies * micro, samples)
        larger = -(-mini // stride) * stride
        step = f" with {_STEP}={-(-prompts // larger) * larger}" if prompts % larger else ""
        many = f"over {copies} devices are {each} each" if copies > 1 else "are a mini-batch"
        keys.problem(
            f"{mini} prompts x {samples} samples = {mini * samples} sequences {many}, which micro-batches of {micro} do not "
            f"divide",
            key=_MICRO,
            fix=f"use {_MICRO}={max(size for size in _divisors(each) if size <= micro)}, or {key}={larger}{step}",
        )
        return False
    return True


def _splits(keys: Reader, key: str, copies: int) -> bool:
    """Tell whether a mini-batch splits over the copies, or SkyRL lets a remainder pass: checks 7 and 10, and its dispatch, which
    takes no step that does not split."""
    step, mini = keys[_STEP] * keys[_SAMPLES], keys[key] * keys[_SAMPLES]
    each = mini // copies
    return not mini % copies or (each > 0 and step % copies == 0 and step // copies % each == 0)


def _update(keys: Reader, key: str, copies: int) -> int:
    """The sequences of an update, of a mini-batch that fits."""
    mini = keys[key] * keys[_SAMPLES]
    size = mini if is_of_2026(keys) else mini // copies * copies
    if size < mini:
        step = keys[_STEP] * keys[_SAMPLES]
        keys.warn(
            f"{key}={keys[key]} is {mini} sequences, which do not split over {copies} devices: as in SkyRL of 2025, each gets "
            f"{mini // copies}, and a step has {step // size} updates of {size} sequences rather than {step // mini} of {mini}"
        )
    return size


def _does_not_split(keys: Reader, key: str, copies: int) -> None:
    """Checks 7 and 10, and what they let pass: a mini-batch that the model's copies cannot share evenly."""
    prompts, samples, mini = keys[_STEP], keys[_SAMPLES], keys[key]
    stride = copies // math.gcd(copies, samples)
    fits = [size for size in _divisors(prompts) if size % stride == 0]
    if fits:
        fix = f"use {key}={_around(fits, mini)[1]}"
    else:
        size = -(-mini // stride) * stride
        fix = f"use {key}={size} with {_STEP}={-(-prompts // size) * size}"
    each = mini * samples // copies
    what = "which gives some of them nothing" if each == 0 else f"which is {mini * samples / copies:.4g} each"
    keys.problem(
        f"{mini} prompts x {samples} sample{'s' * (samples > 1)} = {mini * samples} sequences do not split over {copies} "
        f"devices, {what}",
        key=key,
        fix=fix,
    )


def _check_reference(keys: Reader, copies: dict[str, int]) -> None:
    """A step must give every copy of policy and reference at least one sequence."""
    if "reference" not in copies:
        return
    sequences, needed = keys[_STEP] * keys[_SAMPLES], math.lcm(copies["policy"], copies["reference"])
    if 0 < sequences < needed:
        keys.problem(
            f"a step of {sequences} sequences cannot be shared among {copies['policy']} copies of the policy and "
            f"{copies['reference']} of the reference, which takes {needed}",
            key=_STEP,
            fix=f"use {_STEP}={-(-needed // keys[_SAMPLES])}",
        )


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _around(sizes: list[int], near: int) -> tuple[int, int]:
    """The sizes next to ``near`` below and above it; one of them twice at the ends."""
    below, above = [size for size in sizes if size <= near], [size for size in sizes if size >= near]
    return (below or above)[-1 if below else 0], (above or below)[0 if above else -1]
