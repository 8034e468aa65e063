"""Batch sizes: micro-batch x accumulation x data-parallel ranks is an update, and updates must divide a step."""

from __future__ import annotations

import math
from typing import Any

from posttrain.config.fitting import Fit, fitted_count
from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.look import count
from posttrain.dialects.roll.rules.placement import Copies, RollLayout, reference_ranks

_STEP = "rollout_batch_size"
_SAMPLES = "num_return_sequences_in_group"
_ADJUST = "batch_adjust_mode"
FITS: dict[str, Fit] = {"copy": "copy", "delete": "drop", "auto": "nearest", "random_sample": "one"}
_DOES = {
    "copy": "some, drawn at random, are copied",
    "drop": "some, drawn at random, are left out",
    "nearest": "some, drawn at random, are left out, or copied where that is less",
    "one": "some are drawn at random",
}


def batches(keys: Reader, layout: RollLayout, *, has_reference: bool) -> dict[str, Any]:
    """All sizes of a step, its updates and their micro-batches."""
    prompts, samples = count(keys, _STEP), count(keys, _SAMPLES)
    epochs = count(keys, "ppo_epochs")
    fields: dict[str, Any] = {
        "data.prompts_per_step": prompts,
        "rollout.samples_per_prompt": samples,
        "policy.epochs_per_step": epochs,
    }
    splits = _step_splits(keys, prompts, samples, layout)
    fields |= _updates(keys, "policy", "actor_train", layout.policy, prompts * samples, check=splits)
    if layout.critic:
        fields["critic.epochs_per_step"] = 1
        fields |= _updates(keys, "critic", "critic", layout.critic, prompts * samples, check=splits)
    return fields | forward_only(keys, has_reference=has_reference)


def trajectory_batches(keys: Reader, layout: RollLayout, trajectories: int, *, of_turns: bool) -> dict[str, Any]:
    """Updates and micro-batches of an agentic step. ROLL copies rows, or leaves some out, until they divide by everything that it
    cuts them into; ``of_turns``: the rows are turns, and episodes tell how many there are."""
    fields: dict[str, Any] = {"policy.epochs_per_step": count(keys, "ppo_epochs")}
    roles = [("policy", "actor_train", layout.policy)] + (
        [("critic", "critic", layout.critic)] if layout.critic else []
    )
    if layout.critic:
        fields["critic.epochs_per_step"] = 1
    parts = _row_parts(keys, layout)
    multiple = math.lcm(*parts.values())
    fit = FITS[keys[_ADJUST]]
    rows = fitted_count(trajectories, multiple, fit)
    for role, section, at in roles:
        fields |= _updates(keys, role, section, at, rows, check=False)
        if of_turns and f"{role}.sequences_per_micro_batch_per_device" in fields:
            fields[f"{role}.shuffle"] = True  # a step has several updates as soon as its turns are more than one has
    if not of_turns and rows == trajectories:
        keys.ignore(_ADJUST, f"{trajectories} trajectories divide by {multiple}: none is copied or left out")
        return fields
    what = f"by {multiple}, the least common multiple of " + ", ".join(f"{size} ({of})" for of, size in parts.items())
    if of_turns:
        keys.warn(f"the rows of a step are turns; {_DOES[fit]} until they divide {what} ({_ADJUST}={keys[_ADJUST]})")
    else:
        change = f"{rows - trajectories} are copied" if rows > trajectories else f"{trajectories - rows} are left out"
        keys.warn(f"{trajectories} trajectories do not divide {what}: {change}, drawn at random, and updates are made on {rows} "
                  f"({_ADJUST}={keys[_ADJUST]})")  # fmt: skip
    return fields | {"resampling.fit": fit, "resampling.multiple_of": multiple}


def _row_parts(keys: Reader, layout: RollLayout) -> dict[str, int]:
    """Rows that each role takes at a time, over its data-parallel ranks: in an update, and in a pass without gradient."""
    parts = {}
    sections = [("actor_train", layout.policy)] + ([("critic", layout.critic)] if layout.critic else [])
    for section, at in sections:
        at_args = f"{section}.training_args"
        update = count(keys, f"{at_args}.per_device_train_batch_size") * count(
            keys, f"{at_args}.gradient_accumulation_steps"
        )
        parts[f"updates of {section}"] = update * at.copies
        parts[f"{section}.infer_batch_size"] = count(keys, f"{section}.infer_batch_size") * at.copies
    # ROLL has one with a KL of any kind, used or not; with an adapter it is the policy without it, and no worker of its own
    has_reference = keys["enable_reference"] or keys["use_kl_loss"] or keys["init_kl_coef"] > 0
    if has_reference and not keys["actor_train.model_args.lora_target"]:
        parts["reference.infer_batch_size"] = count(keys, "reference.infer_batch_size") * reference_ranks(keys)
    return parts


def _step_splits(keys: Reader, prompts: int, samples: int, layout: RollLayout) -> bool:
    """Return True when the copies of the policy can share a step evenly. With Megatron ROLL requires it of the prompts."""
    policy = layout.policy
    shared, what = (prompts, f"{prompts} prompts") if layout.megatron else (
        prompts * samples, f"{prompts} prompts x {samples} samples = {prompts * samples} sequences"
    )  # fmt: skip
    together = [policy.copies, *([layout.critic.copies] if layout.critic else [])]
    wrong = policy.copies if shared % policy.copies else next((one for one in together if prompts * samples % one), 0)
    if not wrong:
        return True
    stride = math.lcm(*(one // math.gcd(one, samples) for one in together))
    if layout.megatron:
        stride = math.lcm(stride, policy.copies)
    below, above = prompts // stride * stride, -(-prompts // stride) * stride
    keys.problem(
        f"{what} do not split over {wrong} data-parallel ranks ({policy.in_words})",
        key=_STEP,
        fix=f"use {_STEP}={above}" + (f" or {below}" if below else ""),
    )
    return False


def _updates(keys: Reader, role: str, section: str, at: Copies, sequences: int, *, check: bool) -> dict[str, Any]:
    """Updates and micro-batches of the policy or the critic."""
    at_args = f"{section}.training_args"
    micro, steps = (
        count(keys, f"{at_args}.per_device_train_batch_size"),
        count(keys, f"{at_args}.gradient_accumulation_steps"),
    )
    by_tokens = keys[f"{section}.use_dynamic_batching_in_train"]
    budget = f"{section}.max_tokens_per_microbatch_in_train"
    fields: dict[str, Any] = {f"{role}.sequences_per_mini_batch": micro * steps * at.copies}
    # Cut by tokens ROLL deals a step out in order; a mini-batch that holds the whole step is not drawn
    if not by_tokens and micro * steps * at.copies < sequences:
        fields[f"{role}.shuffle"] = True
    if by_tokens:
        if keys[budget] < 1:
            keys.problem("use_dynamic_batching_in_train needs a number of tokens", key=budget,
                         fix=f"use {budget}={_longest(keys) or 8192} or more")  # fmt: skip
        fields[f"{role}.max_tokens_per_micro_batch"] = keys[budget] or None
    else:
        fields[f"{role}.sequences_per_micro_batch_per_device"] = micro
        keys.ignore(budget, "read with use_dynamic_batching_in_train only")
    each = sequences // at.copies
    if check and each % (micro * steps):
        _does_not_split(keys, at_args, at, sequences, micro, steps)
        fields[f"{role}.sequences_per_mini_batch"] = sequences
    return fields


def _does_not_split(keys: Reader, at_args: str, at: Copies, sequences: int, micro: int, steps: int) -> None:
    each = sequences // at.copies
    name = f"{at_args}.gradient_accumulation_steps"
    shared = f"{sequences} sequences of a step / {at.copies} data-parallel rank{'s' * (at.copies > 1)} ({at.in_words}) = {each}"
    if at.copies == 1:
        shared = f"the {sequences} sequences of a step"
    size = f"{micro} x {steps} = {micro * steps}"
    what = f"{shared} do not split into updates of {size} (per_device_train_batch_size x gradient_accumulation_steps)"
    if each % micro == 0:
        whole = each // micro
        good = [one for one in range(1, whole + 1) if whole % one == 0]
        near = [*[one for one in good if one >= steps][:1], *[one for one in good if one < steps][-1:]]
        fix = f"use {name}=" + " or ".join(str(one) for one in near) + f" ({whole} is one update per step)"
        keys.problem(what, key=name, fix=fix)
        return
    micros = [one for one in range(1, min(micro, each) + 1) if each % one == 0]
    keys.problem(
        what,
        key=f"{at_args}.per_device_train_batch_size",
        fix=f"use {at_args}.per_device_train_batch_size={micros[-1]} with {name}={each // micros[-1]} (one update per step)",
    )


def _longest(keys: Reader) -> int:
    """Tokens of the longest prompt and response together; 0 when they are not given."""
    return int(keys["sequence_length"] or (keys["prompt_length"] + (keys["response_length"] or 0)))


def forward_only(keys: Reader, *, has_reference: bool) -> dict[str, Any]:
    """Log-probs without gradient: of the policy before its updates, and of the reference, in micro-batches of one size."""
    sizes, budgets = [], []
    sections = ["actor_train", *(["reference"] if has_reference else [])]
    for section in sections:
        budget = f"{section}.max_tokens_per_microbatch_in_infer"
        if keys[f"{section}.use_dynamic_batching_in_infer"]:
            if not keys[budget]:
                keys.problem("use_dynamic_batching_in_infer needs a number of tokens", key=budget,
                             fix=f"use {budget}={_longest(keys) or 8192} or more")  # fmt: skip
            else:
                budgets.append(keys[budget])
        else:
            keys.ignore(budget, "read with use_dynamic_batching_in_infer only")
        sizes.append(count(keys, f"{section}.infer_batch_size"))
    if budgets and len(budgets) == len(sections):
        return {"reference.max_tokens_per_micro_batch": min(budgets)}
    return {"reference.sequences_per_micro_batch_per_device": min(sizes)}
