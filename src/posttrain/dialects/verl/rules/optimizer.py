"""Optimizer and learning rate of actor and critic."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.batches import updates_per_step
from posttrain.dialects.verl.rules.engine_schedules import OWN, ignore_others, schedule_of
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR, ROLLOUT
from posttrain.dialects.verl.strategies import MEGATRON, SHARDED, SHARDED_TEXT, TORCHTITAN, VEOMNI
from posttrain.errors import did_you_mean

STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_square_root",
    "inverse_square_root": "inverse_square_root",
    "WSD": "warmup_stable_decay",
}
_MEGATRON_ONLY = (
    "lr_decay_style",
    "min_lr",
    "lr_wsd_decay_steps",
    "lr_wsd_decay_style",
    "lr_warmup_init",
    "lr_decay_steps",
    "weight_decay_incr_style",
    "use_checkpoint_opt_param_scheduler",
)
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "muon": "muon"}
_SGD_MOMENTUM = 0.9  # megatron-core's default
# Megatron's own words for memory, transfers and products in 8 bits, none of which change a number here.
MEMORY_OF_MEGATRON = (
    "barrier_with_L1_time",
    "fp8_recipe",
    "log_num_zeros_in_grad",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "pin_cpu_grads",
    "pin_cpu_params",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "store_param_remainders",
    "use_distributed_optimizer",
    "use_precision_aware_optimizer",
    "use_torch_optimizer_for_cpu_offload",
)
NO_NUMBER = "it sets how Megatron keeps and sends the optimizer's numbers, which are float32 here"
_FSDP_ONLY = ("warmup_style", "lr_scheduler_type", "min_lr_ratio", "num_cycles")


def optimizers(keys: Reader, *, has_critic: bool) -> dict[str, Any]:
    """The settings of the actor, and of the critic where there is one."""
    fields = _schedule(keys, ACTOR, "policy") | _clipping(keys, ACTOR, "policy") | _further(keys, ACTOR, "policy")
    if has_critic:
        fields |= _schedule(keys, "critic", "critic") | _clipping(keys, "critic", "critic")
        fields |= _further(keys, "critic", "critic")
        for name in ("lr", "weight_decay", "betas"):
            value = get(keys, f"critic.optim.{name}")
            if value is not None:
                fields[f"critic.optimizer.{name}"] = value
    return fields


def shuffles(keys: Reader, *, has_critic: bool) -> dict[str, Any]:
    """Mini-batches that are drawn. FSDP's actor takes them in order unless a file writes otherwise, whatever the default says."""
    draws, seed = _shuffle(keys, ACTOR)
    fields: dict[str, Any] = {"policy.shuffle": True} if draws else {}
    if seed is not None:
        fields["policy.shuffle_seed"] = seed
    if has_critic:
        if keys.written("critic.shuffle"):
            theirs, its_seed = _shuffle(keys, "critic")
        else:
            theirs, its_seed = draws, get(keys, "critic.data_loader_seed") if draws else None
        if theirs != draws:
            fields["critic.shuffle"] = theirs
        if its_seed not in (None, seed):
            fields["critic.shuffle_seed"] = its_seed
    return fields


def routing(keys: Reader) -> dict[str, Any]:
    """The experts of a mixture: recorded by the sampler (R3) or with the old log-probs (R2), and replayed by the actor."""
    place = f"{ACTOR}.veomni" if keys[f"{ACTOR}.strategy"] == VEOMNI else ACTOR
    recorded = get(keys, f"{ROLLOUT}.enable_rollout_routing_replay", False)
    mode = get(keys, f"{place}.router_replay.mode")
    if mode == "R2":
        keys.ignore(
            f"{ROLLOUT}.enable_rollout_routing_replay", "router_replay.mode=R2 replays those of the old log-probs"
        )
        return {"policy.routing_replay": True}
    return {"rollout.routing_replay": True} if mode == "R3" or recorded else {}


def _shuffle(keys: Reader, section: str) -> tuple[bool, int | None]:
    """Return True for a section that asks for drawn mini-batches, and their seed."""
    name, seed = f"{section}.shuffle", f"{section}.data_loader_seed"
    reads = keys.written(name) or keys[f"{section}.strategy"] == MEGATRON
    if reads and keys[name]:
        return True, get(keys, seed)
    keys.ignore(seed, f"{name} is false: mini-batches are taken in order")
    return False, None


def _clipping(keys: Reader, section: str, role: str) -> dict[str, Any]:
    """FSDP clips by grad_clip up to verl 0.7 and by optim.clip_grad since 0.8: the written one counts. All others clip by
    optim.clip_grad, whose first name is optim.grad_clip."""
    strategy, first, later = keys[f"{section}.strategy"], f"{section}.grad_clip", f"{section}.optim.clip_grad"
    alias = f"{section}.optim.grad_clip"
    if keys.ledger.find(later) is None:
        return {f"{role}.optimizer.max_grad_norm": keys[first]}
    if get(keys, alias) is not None:
        later = alias
        keys.ignore(f"{section}.optim.clip_grad", f"{alias} replaces it, as in verl")
    if strategy not in SHARDED:
        keys.ignore(first, f"{strategy} clips by optim.clip_grad")
        return {f"{role}.optimizer.max_grad_norm": keys[later]}
    if not keys.written(later):
        return {f"{role}.optimizer.max_grad_norm": keys[first]}
    if not keys.written(first):
        keys.warn(f"{later}={keys[later]:g} clips, as since verl 0.8; with FSDP verl 0.7 clips by {first}=1 alone")
        return {f"{role}.optimizer.max_grad_norm": keys[later]}
    keys.ignore(later, f"{first} is given, too, by which FSDP clips up to verl 0.7")
    if keys[later] != keys[first]:
        keys.warn(f"{first}={keys[first]:g} clips; since verl 0.8 {later}={keys[later]:g} would: write one of them")
    return {f"{role}.optimizer.max_grad_norm": keys[first]}


def _further(keys: Reader, section: str, role: str) -> dict[str, Any]:
    """The optimizer's name, and arguments that have no key of their own."""
    key = f"{section}.optim.override_optimizer_config"
    given = dict(get(keys, key) or {})
    megatron = keys[f"{section}.strategy"] == MEGATRON
    if megatron and "sgd_momentum" in given:
        given.setdefault("momentum", given.pop("sgd_momentum"))
    fields: dict[str, Any] = {}
    name = _optimizer(keys, f"{section}.optim.optimizer")
    if name != "adamw":
        fields[f"{role}.optimizer.name"] = name
    if name == "sgd" and megatron:
        fields[f"{role}.optimizer.momentum"] = _SGD_MOMENTUM
    known = ("eps", "betas", "momentum")
    fields |= {f"{role}.optimizer.{name}": given.pop(name) for name in known if name in given}
    if keys[f"{section}.strategy"] == TORCHTITAN and (eps := get(keys, f"{section}.optim.eps")) is not None:
        fields[f"{role}.optimizer.eps"] = eps
    for name in given:
        if megatron and name in MEMORY_OF_MEGATRON:
            keys.ignore(f"{key}.{name}", NO_NUMBER)
            continue
        keys.problem(
            f"{name} is no argument of the optimizer that can be set here (eps, betas and momentum can)",
            key=f"{key}.{name}",
            fix="remove it; weight decay and learning rate have keys of their own",
        )
    return fields


def _optimizer(keys: Reader, key: str) -> str:
    """Return our name of the optimizer."""
    written = str(get(keys, key) or "adam")
    ours = OPTIMIZERS.get(written.lower())
    if ours is None:
        fix = did_you_mean(written, ["AdamW", "SGD", "Muon"], listed=True) or f"use {key}=AdamW"
        keys.problem(f"there is no optimizer called {written} (known: AdamW, SGD, Muon)", key=key, fix=fix)
    return ours or "adamw"


def _schedule(keys: Reader, section: str, role: str) -> dict[str, Any]:
    optim, ours = f"{section}.optim", f"{role}.schedule"
    strategy = keys[f"{section}.strategy"]
    if strategy in OWN:
        for name in _MEGATRON_ONLY:
            keys.ignore(f"{optim}.{name}", f"read by the strategy {MEGATRON} only")
        updates = updates_per_step(keys, section)
        fields = schedule_of(keys, optim, ours, strategy=strategy, updates=updates)
        return fields | _pace(keys, section, ours, fields)
    ignore_others(keys, optim, strategy)
    megatron = keys[f"{section}.strategy"] == MEGATRON and keys.ledger.find(f"{optim}.lr_decay_style")
    fields = _warmup(keys, section, ours, zero_counts=not megatron)
    for name in _FSDP_ONLY if megatron else _MEGATRON_ONLY:
        other = SHARDED_TEXT if megatron else f"the strategy {MEGATRON}"
        keys.ignore(f"{optim}.{name}", f"read by {other} only")
    if get(keys, f"{optim}.zero_indexed_step", True) is False:
        fields[f"{ours}.counts_from"] = 1
    if megatron:
        grows = keys[f"{optim}.weight_decay_incr_style"]
        if grows != "constant":
            fields[f"{role}.optimizer.weight_decay_shape"] = grows
        if keys[f"{optim}.use_checkpoint_opt_param_scheduler"]:
            fields[f"{ours}.from_checkpoint"] = True
        fields |= _decay(keys, section, ours) | _ends(keys, section, ours)
        return fields | _pace(keys, section, ours, fields)
    name = _style(keys, optim)
    fields[f"{ours}.name"] = name
    fields |= _pace(keys, section, ours, fields)
    if name == "cosine":
        fields[f"{ours}.min_lr_ratio"] = get(keys, f"{optim}.min_lr_ratio", 0.0)
        fields[f"{ours}.cycles"] = get(keys, f"{optim}.num_cycles", 0.5)
    else:
        for setting in ("min_lr_ratio", "num_cycles"):
            keys.ignore(f"{optim}.{setting}", "the learning rate is constant after warm-up")
    return fields


def _pace(keys: Reader, section: str, ours: str, fields: dict[str, Any]) -> dict[str, Any]:
    """verl's learning rate moves once per iteration; nothing is said of one that does not move, or an iteration of one update."""
    moves = (
        fields[f"{ours}.name"] != "constant"
        or fields.get(f"{ours}.warmup_updates")
        or fields.get(f"{ours}.warmup_ratio")
    )
    return {f"{ours}.moves_every": "step"} if moves and updates_per_step(keys, section) > 1 else {}


def _style(keys: Reader, optim: str) -> str:
    """warmup_style, or the name it has later."""
    old, new = keys[f"{optim}.warmup_style"], get(keys, f"{optim}.lr_scheduler_type")
    if None not in (old, new) and new != old and keys.written(f"{optim}.warmup_style"):
        what = f"{optim}.warmup_style is {old}, and lr_scheduler_type, its later name, is {new}"
        keys.problem(
            what, key=f"{optim}.lr_scheduler_type", fix=f"keep one of them, such as {optim}.lr_scheduler_type={old}"
        )
    return str(new or old or "constant")


def _warmup(keys: Reader, section: str, ours: str, *, zero_counts: bool) -> dict[str, Any]:
    """Iterations of warm-up become updates. Megatron takes 0 for not given, and a share of the iterations of the decay."""
    optim = f"{section}.optim"
    steps = get(keys, f"{optim}.lr_warmup_steps", -1)
    if steps > 0 or (steps == 0 and zero_counts):
        if keys[f"{optim}.lr_warmup_steps_ratio"]:
            keys.ignore(f"{optim}.lr_warmup_steps_ratio", "lr_warmup_steps is given, and counts")
        return {f"{ours}.warmup_updates": steps * updates_per_step(keys, section)}
    ratio = keys[f"{optim}.lr_warmup_steps_ratio"]
    decay = None if zero_counts else keys[f"{optim}.lr_decay_steps"]
    if ratio and decay is not None:
        return {f"{ours}.warmup_updates": int(ratio * decay) * updates_per_step(keys, section)}
    return {f"{ours}.warmup_ratio": ratio}


def _decay(keys: Reader, section: str, ours: str) -> dict[str, Any]:
    """Megatron's schedule after warm-up."""
    optim = f"{section}.optim"
    style, lr, floor = keys[f"{optim}.lr_decay_style"], keys[f"{optim}.lr"], keys[f"{optim}.min_lr"]
    fields: dict[str, Any] = {f"{ours}.name": STYLES[style]}
    if style != "constant" and lr > 0:
        fields[f"{ours}.min_lr_ratio"] = floor / lr
    elif floor:
        keys.ignore(f"{optim}.min_lr", f"lr_decay_style={style} has no floor here")
    if style == "WSD":
        return fields | _stable_share(keys, section, ours) | {f"{ours}.decay": keys[f"{optim}.lr_wsd_decay_style"]}
    for name in ("lr_wsd_decay_steps", "lr_wsd_decay_style"):
        keys.ignore(f"{optim}.{name}", "read with lr_decay_style=WSD only")
    return fields


def _ends(keys: Reader, section: str, ours: str) -> dict[str, Any]:
    """Return the start of Megatron's warm-up and the end of its decay."""
    optim = f"{section}.optim"
    start, end, lr = keys[f"{optim}.lr_warmup_init"], keys[f"{optim}.lr_decay_steps"], keys[f"{optim}.lr"]
    fields: dict[str, Any] = {}
    if start > lr:
        what = f"the warm-up starts at {start:g}, above the peak of {lr:g}"
        keys.problem(what, key=f"{optim}.lr_warmup_init", fix=f"use {optim}.lr_warmup_init={lr:g} or less")
    elif start:
        fields[f"{ours}.warmup_start_ratio"] = start / lr
    if end is not None and keys[f"{optim}.lr_decay_style"] == "constant":
        if not keys[f"{optim}.lr_warmup_steps_ratio"]:
            keys.ignore(f"{optim}.lr_decay_steps", "the learning rate is constant after warm-up")
    elif end is not None:
        fields[f"{ours}.decay_updates"] = end * updates_per_step(keys, section)
    return fields


def _stable_share(keys: Reader, section: str, ours: str) -> dict[str, Any]:
    optim = f"{section}.optim"
    decay, total = keys[f"{optim}.lr_wsd_decay_steps"], keys[f"{optim}.lr_decay_steps"]
    total = keys["trainer.total_training_steps"] if total is None else total
    if decay is None:
        what = "lr_decay_style=WSD needs the iterations of its decay"
        keys.problem(what, key=f"{optim}.lr_wsd_decay_steps", fix=f"give it, such as {optim}.lr_wsd_decay_steps=100")
        return {}
    if total is None:
        what = "the share of a decay of so many iterations is known only where trainer.total_training_steps is given"
        keys.problem(what, key=f"{optim}.lr_wsd_decay_steps", fix="give trainer.total_training_steps")
        return {}
    steps = get(keys, f"{optim}.lr_warmup_steps", 0)
    warmup = steps if steps > 0 else int(keys[f"{optim}.lr_warmup_steps_ratio"] * total)
    if not 0 <= decay <= total - warmup:
        what = f"a decay of {decay} iterations does not fit into {total} - {warmup} of warm-up"
        keys.problem(
            what,
            key=f"{optim}.lr_wsd_decay_steps",
            fix=f"use {optim}.lr_wsd_decay_steps={max(0, total - warmup)} or fewer",
        )
        return {}
    return {f"{ours}.stable_ratio": 1 - decay / (total - warmup) if total > warmup else 1.0}
