"""Batch sizes: verl's prompts, sequences on all devices and sequences per device become our sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from posttrain.dialects.env_managers import plays_managers
from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.layout import Layout
from posttrain.dialects.verl.rules.look import all_are_counts, divisors_around, get
from posttrain.dialects.verl.rules.names import ACTOR, REF, ROLLOUT
from posttrain.dialects.verl.rules.own_loop import repeats
from posttrain.dialects.verl.rules.recipes import is_fully_async
from posttrain.dialects.verl.strategies import MEGATRON, SHARDED
from posttrain.dialects.versions import checkout_version

_BY_TOKENS = "micro-batches are cut by tokens (use_dynamic_bsz)"
_BY_COUNT = "read with use_dynamic_bsz only"
MOST_CHOSEN = 8  # sequences of a micro-batch on one device, where a file leaves the size open
# Their data-parallel actors split a step into mini-batches of which the last may be smaller
SPLITS_RAGGED = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6")
OLD = ("0.1", "0.2")  # a mini-batch may be more than the step, and the critic's is in sequences


def batches(keys: Reader, layout: Layout, *, has_critic: bool, has_reference: bool) -> dict[str, Any]:
    """All sizes of a step, its updates and their micro-batches."""
    _check_step(keys, layout)
    fields = _updates(keys, "policy", ACTOR, layout.actor_copies, layout.sequence_parallel, layout)
    if has_critic:
        fields |= _updates(keys, "critic", "critic", layout.critic_copies, layout.critic_sequence_parallel, layout)
    return fields | _forward_only(keys, layout, has_reference=has_reference)


def count_generated(keys: Reader) -> dict[str, Any]:
    """Train on every generated prompt where no filter drops groups: a generation is then the step, as verl's loader has it."""
    size, prompts = keys["data.gen_batch_size"], keys["data.train_batch_size"]
    if size in (None, prompts) or get(keys, "algorithm.filter_groups.enable") or not all_are_counts(size):
        return {}
    keys.warn(
        f"a step is data.gen_batch_size={size} prompts, not data.train_batch_size={prompts}: verl trains on all that it "
        "generates where algorithm.filter_groups is off"
    )
    keys.put("data.train_batch_size", size)
    return {"data.prompts_per_step": size}


def updates_per_step(keys: Reader, section: str) -> int:
    """Optimizer steps of an iteration."""
    step, mini = _step(keys, section).size, keys[f"{section}.ppo_mini_batch_size"]
    return int(max(1, -(-step // max(1, mini))) * max(1, keys[f"{section}.ppo_epochs"]))


def ends_smaller(keys: Reader) -> bool:
    """Return True for verl whose data-parallel actors let the last mini-batch be smaller; later and Megatron's refuse it."""
    sharded = keys[f"{ACTOR}.strategy"] in SHARDED
    return sharded and (keys.ledger.version in OLD or checkout_version() in SPLITS_RAGGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """An iteration in the unit of a role's mini-batches."""

    size: int
    unit: str
    samples: int  # sequences per unit


def _step(keys: Reader, section: str) -> _Step:
    """Count an iteration in prompts, as often as a loop of its own repeats them, or in sequences for the critic of verl 0.1 and
    0.2, whose sizes leave rollout.n out."""
    prompts, samples = keys["data.train_batch_size"], keys[f"{ROLLOUT}.n"]
    if plays_managers(keys):  # whose steps have as many turns as their episodes take
        return _Step(size=keys[f"{section}.ppo_mini_batch_size"], unit="turns", samples=1)
    if section == "critic" and keys.ledger.version in OLD:
        return _Step(size=prompts * samples, unit="sequences", samples=1)
    count = repeats(keys)
    unit = "prompts" if count == 1 else "repeated prompts"
    return _Step(size=prompts * count, unit=unit, samples=samples // count)


def _shares(keys: Reader, layout: Layout) -> int:
    """Parts of equal size that the sequences of a step must make, as verl checks them: one for every device, or one for every
    copy of the model with Megatron, and with micro-batches that are cut by tokens."""
    by_copies = keys[f"{ACTOR}.strategy"] == MEGATRON or (
        keys[f"{ACTOR}.use_dynamic_bsz"] and keys.ledger.version not in OLD
    )
    return math.lcm(layout.actor_copies, layout.critic_copies) if by_copies else layout.devices


def _check_step(keys: Reader, layout: Layout) -> None:
    """The sequences of a step are shared out evenly."""
    prompts, samples = keys["data.train_batch_size"], keys[f"{ROLLOUT}.n"]
    if not all_are_counts(prompts, samples):
        return
    shares = _shares(keys, layout)
    if prompts * samples % shares and is_fully_async(keys):
        what = f"{prompts} prompts x {samples} samples do not split over {shares} devices"
        keys.warn(f"{what}: verl stops there, and here some get one sequence more, which changes no number")
    elif prompts * samples % shares and keys.here:
        what = f"{prompts} prompts x {samples} samples do not split over {shares} devices: verl stops there, --here has one"
        keys.warn(what)
    elif prompts * samples % shares:
        stride = shares // math.gcd(shares, samples)
        below, above = prompts // stride * stride, -(-prompts // stride) * stride
        keys.problem(
            f"{prompts} prompts x {samples} samples = {prompts * samples} sequences do not split over "
            f"{shares} devices{_shared(shares, layout)}",
            key="data.train_batch_size",
            fix="use " + " or ".join(_step_of(keys, layout, count) for count in (above, below) if count),
        )


def _step_of(keys: Reader, layout: Layout, prompts: int) -> str:
    """The change to so many prompts, and to mini-batches that they split into."""
    mini, samples = keys[f"{ACTOR}.ppo_mini_batch_size"], keys[f"{ROLLOUT}.n"]
    change = f"data.train_batch_size={prompts}"
    if prompts % max(1, mini) == 0:
        return change
    fits = [count for count in range(1, prompts + 1) if prompts % count == count * samples % layout.actor_copies == 0]
    return f"{change} with {ACTOR}.ppo_mini_batch_size={min(fits, key=lambda count: abs(count - mini))}"


def _updates(
    keys: Reader, role: str, section: str, copies: int, sequence_parallel: int, layout: Layout
) -> dict[str, Any]:
    """Mini-batches and micro-batches of the actor or the critic."""
    samples = _step(keys, section).samples
    mini = _mini_batch(keys, section, copies, layout)
    fields: dict[str, Any] = {}
    if mini is not None and mini * samples % copies and is_fully_async(keys) and not keys.here:
        fields["policy.uneven_shares"] = True
    if mini is not None:
        fields[f"{role}.sequences_per_mini_batch"] = mini * samples
        if all_are_counts(mini, _step(keys, section).size) and _step(keys, section).size % mini:
            fields["policy.smaller_last_mini_batch"] = True
    by_tokens = keys[f"{section}.use_dynamic_bsz"]
    budget = f"{section}.ppo_max_token_len_per_gpu"
    name = f"{section}.ppo_micro_batch_size"
    if section == "critic" and not by_tokens and (size := _like_the_actor(keys, layout)) is not None:
        return fields | {f"{role}.sequences_per_micro_batch_per_device": size}
    size = per_device(keys, name, copies, needed=not by_tokens, mini=mini, sequence_parallel=sequence_parallel)
    if size is not None and mini is not None and mini < keys[f"{section}.ppo_mini_batch_size"]:
        size = _within_the_step(keys, section, mini * samples // copies, size, copies)
    elif size is not None and mini is not None and size >= 1:
        _check_micro_batch(keys, section, mini, size, copies, layout)
    if not by_tokens:
        keys.ignore(budget, _BY_COUNT)
        return fields | ({f"{role}.sequences_per_micro_batch_per_device": size} if size is not None else {})
    for name in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"):
        if keys[f"{section}.{name}"] is not None:
            keys.ignore(f"{section}.{name}", _BY_TOKENS)
    _check_budget(keys, budget, sequence_parallel)
    return fields | {f"{role}.max_tokens_per_micro_batch": keys[budget]}


def _within_the_step(keys: Reader, section: str, share: int, size: int, copies: int) -> int:
    """The size of micro-batches where a mini-batch is more than the step: a divisor of a device's share of the step.

    verl divides the loss of every micro-batch by the number of micro-batches of the written mini-batch.
    """
    written = keys[f"{section}.ppo_mini_batch_size"] * _step(keys, section).samples // copies
    if size < 1 or share < 1:
        return size
    by_tokens = keys[f"{section}.use_dynamic_bsz"]
    parts, divided_by = (share, written) if by_tokens else (-(-share // size), written // size)
    if divided_by > parts:
        less = f"{divided_by / parts:.4g} times smaller than the mean over the step"
        keys.warn(
            f"{section}: verl {keys.ledger.version} makes the gradient of such a step {less}, which is used here: "
            "with gradient clipping, the two differ"
        )
    return divisors_around(share, min(size, share))[0]


def _like_the_actor(keys: Reader, layout: Layout) -> int | None:
    """The actor's size, for a configuration without a word about the critic (as the blocks of verl's page are)."""
    each, total = (keys[f"{ACTOR}.ppo_micro_batch_size{end}"] for end in ("_per_gpu", ""))
    if keys.written("critic") or (each is None) == (total is None):
        return None
    keys.warn(
        "critic.ppo_micro_batch_size_per_gpu is not given, which verl refuses; nothing is said about the critic, and it takes "
        "the actor's size"
    )
    return int(each or max(1, total // layout.critic_copies))


def _mini_batch(keys: Reader, section: str, copies: int, layout: Layout) -> int | None:
    """Prompts per update; None where they are refused."""
    key = f"{section}.ppo_mini_batch_size"
    step = _step(keys, section)
    prompts, samples, mini = step.size, step.samples, keys[key]
    if not all_are_counts(prompts, samples, mini):
        return int(mini)  # refused as a RunConfig
    # A fork of an old verl may have keys of a later one
    is_old = keys.ledger.version in OLD or checkout_version() in OLD
    if mini > prompts and (is_old or keys[f"{ACTOR}.use_dynamic_bsz"]):
        keys.warn(f"{key}={mini} is more than the {prompts} {step.unit} of an iteration, which are one mini-batch then")
        mini = prompts
    if mini > prompts:
        what = f"a mini-batch of {mini} prompts is more than an iteration has (data.train_batch_size={prompts})"
        keys.problem(what, key=key, fix=f"use {key}={prompts}, or data.train_batch_size={mini}")
        return None
    if prompts % mini and ends_smaller(keys):
        updates = -(-prompts // mini)
        keys.warn(f"{key}={mini}: the last of {updates} mini-batches has {prompts % mini} {step.unit}, as in verl")
    elif prompts % mini:
        below, above = divisors_around(prompts, mini)
        what = f"{prompts} {step.unit} do not split into mini-batches of {mini} ({prompts} / {mini} = {prompts / mini:.4g})"
        keys.problem(what, key=key, fix=f"use {key}={above} or {below}")
        return None
    if mini * samples % copies and not keys.here and not is_fully_async(keys):
        if prompts * samples % _shares(keys, layout):  # told: the step itself does not split
            return None
        stride = copies // math.gcd(copies, samples)
        fits = next((count for count in range(mini, prompts + 1) if prompts % count == 0 and count % stride == 0), 0)
        product = f"{mini} prompts x {samples} samples = " if step.unit == "prompts" else ""
        keys.problem(
            f"{product}{mini * samples} sequences of a mini-batch do not split over {copies} devices{_shared(copies, layout)}",
            key=key,
            fix=f"use {key}={fits}"
            if fits
            else f"use {key}={stride} with data.train_batch_size={stride}, or a multiple",
        )
        return None
    return int(mini)


def _shared(copies: int, layout: Layout) -> str:
    return f" ({layout.devices} that hold {copies} copies of the model)" if copies != layout.devices else ""


def per_device(
    keys: Reader, name: str, copies: int, *, needed: bool, mini: int | None = None, sequence_parallel: int = 1
) -> int | None:
    """The size of a micro-batch on one device, from ``name`` (deprecated, all devices together) or ``name``_per_gpu.

    A null in a file, as verl's own have it, leaves the choice to this program; without a word it is an error, as in verl.
    """
    total, each = keys[name], keys[f"{name}_per_gpu"]
    if total is not None and each is not None:
        if needed and keys.of_checkout(name) and not keys.of_checkout(f"{name}_per_gpu"):
            # A fork's program may let both stand; what a micro-batch holds changes no result here
            keys.warn(
                f"{name}={total} of the checkout's own file gives way to {name}_per_gpu={each}, which the launch sets"
            )
        elif needed:
            what = f"{name} and {name}_per_gpu are both given"
            keys.problem(what, key=name, fix=f"remove {name}, which is deprecated")
        return int(each)
    if each is not None:
        return int(each)
    if total is None:
        if needed and keys.in_file(f"{name}_per_gpu") and f"{name}_per_gpu" not in keys.bad:
            return _chosen_here(keys, f"{name}_per_gpu", copies, mini)
        if needed and name not in keys.bad and f"{name}_per_gpu" not in keys.bad:
            keys.problem(
                f"the size of micro-batches is not given: {name}_per_gpu is null, in verl's own file too",
                key=f"{name}_per_gpu",
                fix=f"use {name}_per_gpu=8, or another number of sequences per device",
            )
        return None
    if not all_are_counts(total):
        return int(total)
    each = total // copies  # verl rounds down
    if not each and needed:
        what = f"{name} is {total} sequences on all devices together, and {copies} devices share them (fewer than one each)"
        if keys.here:
            keys.warn(f"{what}: verl stops there, and the one device of --here takes one at a time")
            return 1
        keys.problem(what, key=name, fix=f"use {name}={copies}, or {name}_per_gpu=1 in its place")
    if not each:
        return None
    if mini is not None and needed and not _divides(keys, name, total, copies):
        written = keys[f"{name.rpartition('.')[0]}.ppo_mini_batch_size"]
        below, above = divisors_around(written, min(total, written))
        keys.problem(
            f"{name} is {total}, which does not divide the mini-batch of {written}",
            key=name,
            fix=f"use {name}={below if below % copies == 0 else above}, or {name}_per_gpu={each} in its place",
        )
        return None
    unit = "sequences"
    if keys.ledger.version == "0.1" and name.startswith("actor_rollout_ref.") and all_are_counts(keys[f"{ROLLOUT}.n"]):
        # 0.1 counts prompts here, as often as a loop of its own repeats them, and every prompt has n sequences
        each, unit = each * keys[f"{ROLLOUT}.n"] // repeats(keys), "prompts"
    rounded = ", rounded down" if total % copies else ""
    keys.warn(
        f"{name} is deprecated: {total} {unit} on {copies} device{'s' * (copies > 1)} are {name}_per_gpu={each}{rounded}"
    )
    return int(each)


def _divides(keys: Reader, name: str, total: int, copies: int) -> bool:
    """Return True when verl accepts the size of micro-batches beside the written mini-batch.

    0.1 compares the two on one device, later versions as they are written.
    """
    written = keys[f"{name.rpartition('.')[0]}.ppo_mini_batch_size"]
    if keys.ledger.version == "0.1" and not keys.here:
        return bool(written // copies % (total // copies) == 0)
    return bool(written % total == 0)


def _chosen_here(keys: Reader, key: str, copies: int, mini: int | None) -> int | None:
    """A size for a null: at most 8 sequences, and a divisor of a device's share of the mini-batch."""
    samples = _step(keys, ACTOR).samples
    if mini is None or not all_are_counts(samples, mini) or mini * samples % copies:
        size = MOST_CHOSEN
    else:
        share = mini * samples // copies
        size = max(count for count in range(1, MOST_CHOSEN + 1) if share % count == 0)
    keys.warn(
        f"{key} is null, which verl refuses; {size} is used: here the size changes memory and speed, not the gradient"
    )
    return size


def _check_micro_batch(keys: Reader, section: str, mini: int, size: int, copies: int, layout: Layout) -> None:
    """A mini-batch's share on one device must be whole micro-batches."""
    step = _step(keys, ACTOR)
    prompts, samples = step.size, step.samples
    each, rest = divmod(mini * samples, copies)
    if rest or not all_are_counts(prompts, samples, mini) or each % size == 0:
        return
    key = f"{section}.ppo_mini_batch_size"
    fitting = divisors_around(each, min(size, each))[0]
    if keys.here:
        keys.warn(
            f"{key} does not split over {copies} devices in micro-batches of {size}: verl stops there, --here has one"
        )
        return
    stride = copies * size // math.gcd(copies * size, samples)
    more = -(-mini // stride) * stride
    shares = _shares(keys, layout)
    together = math.lcm(more, shares // math.gcd(shares, samples))
    enough = -(-prompts // together) * together
    more_prompts = "" if enough == prompts else f" with data.train_batch_size={enough // repeats(keys)}"
    keys.problem(
        f"{mini} prompts x {samples} samples = {mini * samples} sequences do not split over {copies} "
        f"device{'s' * (copies > 1)} in micro-batches of {size}",
        key=key,
        fix=f"use {key}={more}{more_prompts}, or {section}.ppo_micro_batch_size_per_gpu={fitting}",
    )


def _check_budget(keys: Reader, key: str, sequence_parallel: int) -> None:
    """A prompt and its response must fit into a micro-batch."""
    prompt, response = keys["data.max_prompt_length"], keys[f"{ROLLOUT}.response_length"]
    if keys[key] >= 1 and keys[key] * sequence_parallel < prompt + response:
        least = -(-(prompt + response) // sequence_parallel)
        on = f" x {sequence_parallel} devices that share a sequence" if sequence_parallel > 1 else ""
        keys.problem(
            f"{keys[key]} tokens{on} cannot hold a prompt and its response of {prompt} + {response} = {prompt + response}",
            key=key,
            fix=f"use {key}={least} or more, or shorter prompts and responses",
        )


def _forward_only(keys: Reader, layout: Layout, *, has_reference: bool) -> dict[str, Any]:
    """Log-probs without gradient: of the actor before the update (rollout.log_prob_*), and of the reference (ref.log_prob_*).
    They share one size here, the smaller of the two, since it changes memory and speed only."""
    by_tokens = keys[f"{ACTOR}.use_dynamic_bsz"]
    sizes, budgets = [], []
    sections = [ROLLOUT, REF] if has_reference else [ROLLOUT]
    for section in sections:
        own = keys[f"{section}.log_prob_use_dynamic_bsz"]
        size = per_device(
            keys, f"{section}.log_prob_micro_batch_size", layout.actor_copies, needed=not (by_tokens and own)
        )
        if own:
            _check_budget(keys, f"{section}.log_prob_max_token_len_per_gpu", layout.sequence_parallel)
            budgets.append(keys[f"{section}.log_prob_max_token_len_per_gpu"])
        else:
            keys.ignore(f"{section}.log_prob_max_token_len_per_gpu", "read with log_prob_use_dynamic_bsz only")
        if size is not None and own:
            keys.ignore(f"{section}.log_prob_micro_batch_size_per_gpu", "these passes are cut by tokens")
        elif size is not None:
            sizes.append(size)
    fields: dict[str, Any] = {}
    if sizes:
        fields["reference.sequences_per_micro_batch_per_device"] = min(sizes)
    if len(budgets) == len(sections):
        fields["reference.max_tokens_per_micro_batch"] = least = min(budgets)
        for section, budget in zip(sections, budgets, strict=True):
            if budget > least:
                reason = f"passes without gradient share the smaller of the two sizes, {least}; it changes memory and speed only"
                keys.ignore(f"{section}.log_prob_max_token_len_per_gpu", reason)
    return fields
