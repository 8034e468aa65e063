"""Devices: who has which, in which engine, and how many copies of a model they hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from posttrain.dialects.likeness import one_slip, short_of
from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.devices import EXAMPLE, devices_of
from posttrain.dialects.roll.ledger import LEDGER
from posttrain.dialects.roll.rules.look import CONFIG, count, samples_only, written_config
from posttrain.dialects.roll.rules.teacher_workers import teacher_devices
from posttrain.dialects.roll.strategies import DEEPSPEED, MEGATRON, ONE_PROCESS, SHARDED
from posttrain.plan.engine import engine_called

# Names below strategy_config that one family of engines reads, and which.
READERS = {row.name.partition(f"{CONFIG}.")[2]: row.engine for row in LEDGER.rows if row.engine}
_SPECIAL = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "tensor_parallel_size",
)  # fmt: skip
_SAVING: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "save_only_model": ("checkpoint.save_optimizer", operator.not_),
    "async_save_ckpt": ("checkpoint.background", bool),
}
ENGINES = {"hf_infer": "hf"}
_PARALLEL = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "sequence_parallel": "context_parallel_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """A trained role: its devices, and how many copies of the model they hold (data-parallel size)."""

    devices: int
    copies: int
    in_words: str  # 16 devices / tensor_model_parallel_size 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RollLayout:
    policy: Copies
    critic: Copies | None
    megatron: bool  # trains the policy


def layout(keys: Reader, *, has_critic: bool, has_reference: bool) -> tuple[RollLayout, dict[str, Any]]:
    """Complains about devices that cannot be shared out."""
    sections = {"policy": "actor_train", "rollout": "actor_infer"}
    sections |= {"critic": "critic"} if has_critic else {}
    sections |= {"reference": "reference"} if has_reference else {}
    devices = {role: device_ids(keys, section) for role, section in sections.items()}
    for section in sorted({"critic", "reference"} - {*sections.values()}):
        if keys[f"{section}.device_mapping"] not in ("[]", []):
            device_ids(keys, section)  # unused, and wrong all the same
    if samples_only(keys):
        devices["policy"] = devices["rollout"]
        keys.warn("actor_train has no devices, so the run plays the episodes of all its steps once and trains nothing")
    devices["rollout"] = _beside_the_policy(keys, devices["policy"], devices["rollout"])
    judges = [device_ids(keys, section) for section in _judges(keys)]
    taught = teacher_devices(keys).values() if keys["is_pure_opd"] or keys["use_opd"] else []
    total = max((max(ids) + 1 for ids in (*devices.values(), *judges, *taught) if ids), default=1)
    per_node = count(keys, "num_gpus_per_node")
    nodes = -(-total // per_node)
    if total % nodes:  # the last node is there as a whole
        total = nodes * per_node
    everywhere = list(range(total))
    fields: dict[str, Any] = {"placement.devices": total, "placement.nodes": nodes}
    for role, ids in devices.items():
        if ids and ids != everywhere:
            fields[f"{role}.devices"] = ids
    both = sorted({*devices["policy"]} & {*devices["rollout"]})
    if keys["async_generation_ratio"] > 0 and both:
        keys.warn(
            f"actor_train and actor_infer are both on device{'s' * (len(both) > 1)} {', '.join(map(str, both))}: with "
            f"async_generation_ratio={keys['async_generation_ratio']:g} they work at the same time, and cannot take turns there"
        )
    for role in ("policy", "critic"):
        if total > 1 and role in devices and not devices[role]:
            placed = [*(sections[each] for each, ids in devices.items() if ids), *_judges(keys)]
            others = ", ".join(f"{section}.device_mapping" for section in placed)
            keys.problem(
                f"{sections[role]} has no device_mapping, and {others} has one: a CPU worker cannot train beside devices",
                key=f"{sections[role]}.device_mapping",
                fix=f"use {sections[role]}.device_mapping={_text(everywhere)!r}",
            )
    policy = trained(keys, "policy", "actor_train", devices["policy"], fields)
    critic = trained(keys, "critic", "critic", devices["critic"], fields) if has_critic else None
    if has_reference:
        fields |= options(keys, "reference", "reference", keys["reference.strategy_args.strategy_name"])
        _check_inference_stage(keys)
    fields |= _sampler(keys, devices["rollout"] or [0])
    megatron = keys["actor_train.strategy_args.strategy_name"] == f"{MEGATRON}_train"
    return RollLayout(policy=policy, critic=critic, megatron=megatron), fields


def _beside_the_policy(keys: Reader, policy: list[int], rollout: list[int]) -> list[int]:
    """Return the samplers' devices. Of an asynchronous run that samples on the policy's devices and on more, those are the others
    (ROLL's partial mode: the samplers on the policy's devices pause while it trains)."""
    shared = {*policy} & {*rollout}
    others = [each for each in rollout if each not in shared]
    if keys["async_generation_ratio"] <= 0 or not shared or not others:
        return rollout
    keys.warn(
        f"actor_infer samples on devices {_listed(others)}, and leaves {_listed(sorted(shared))} to actor_train, which trains "
        "there at the same time; responses are the same"
    )
    return others


def _listed(ids: list[int]) -> str:
    return ", ".join(map(str, ids))


def _judges(keys: Reader) -> list[str]:
    """Return the sections of judges with devices of their own."""
    domains = [f"rewards.{name}" for name, section in keys.section("rewards").items() if isinstance(section, dict)]
    return [section for section in ("reward_model", *domains) if keys.written(f"{section}.device_mapping")]


def _text(ids: list[int]) -> str:
    return f"list(range(0,{len(ids)}))"


def device_ids(keys: Reader, section: str) -> list[int]:
    """A role's device ids; none for a CPU worker."""
    key = f"{section}.device_mapping"
    if keys[key] is None:
        return []
    try:
        return devices_of(keys[key])
    except ValueError as error:
        keys.problem(f"{key}={error}", key=key, fix=EXAMPLE)
        return []


def trained(keys: Reader, role: str, section: str, ids: list[int], fields: dict[str, Any]) -> Copies:
    """Sets engine, parallel sizes and options of a trained role."""
    strategy = keys[f"{section}.strategy_args.strategy_name"]
    family = strategy.removesuffix("_train")
    if family.endswith("_infer"):
        key = f"{section}.strategy_args.strategy_name"
        keys.problem(
            f"{key}={strategy} trains nothing", key=key, fix="use megatron_train, deepspeed_train or fsdp2_train"
        )
        family = "fsdp2"
    size = max(1, len(ids))
    fields[f"{role}.engine"] = engine_called(family, devices=size)
    sizes: dict[str, int] = {}
    if family == MEGATRON:
        sizes = {ours: count(keys, f"{section}.{CONFIG}.{theirs}") for ours, theirs in _PARALLEL.items()}
        keys.ignore(
            f"{section}.model_args.ulysses_size",
            "read by fsdp2_train and deepspeed_train; Megatron's is context_parallel_size",
        )
        _check_megatron(keys, section)
    elif family == SHARDED:
        sizes = {"sequence_parallel": count(keys, f"{section}.model_args.ulysses_size")}
        _check_fsdp(keys, section, sizes["sequence_parallel"])
    elif family == DEEPSPEED:  # ROLL splits sequences with it until 2026-03
        sizes = {"sequence_parallel": count(keys, f"{section}.model_args.ulysses_size")}
        _check_stage(keys, section)
    else:
        keys.ignore(f"{section}.model_args.ulysses_size", f"{strategy} does not split sequences")
    if family == ONE_PROCESS and size > 1:
        keys.problem(f"{section} has {size} devices, and local trains on one", key=f"{section}.strategy_args.strategy_name",
                     fix=f"use {section}.strategy_args.strategy_name=fsdp2_train, or one device")  # fmt: skip
    shared = 1
    for each in sizes.values():
        shared *= each
    words = " x ".join(f"{_their_name(family, name)} {each}" for name, each in sizes.items() if each > 1)
    if size % shared:
        name = max(sizes, key=lambda name: sizes[name])
        key = f"{section}.{CONFIG}.{_PARALLEL[name]}" if family == MEGATRON else f"{section}.model_args.ulysses_size"
        fits = [one for one in range(min(shared, size), 0, -1) if size % one == 0]
        keys.problem(
            f"{size} device{'s' * (size > 1)} of {section} do not split into groups of {words}",
            key=key,
            fix=f"use sizes whose product divides {size}, such as {fits[0]}, or {-(-size // shared) * shared} devices",
        )
        sizes, shared = dict.fromkeys(sizes, 1), 1
    fields |= {f"{role}.{name}": each for name, each in sizes.items()}
    fields |= options(keys, role, section, strategy)
    return Copies(
        devices=size, copies=size // shared, in_words=f"{size} devices / {words}" if words else f"{size} devices"
    )


def reference_ranks(keys: Reader) -> int:
    """The data-parallel size of the reference."""
    section = "reference"
    strategy = keys[f"{section}.strategy_args.strategy_name"] or ""
    shared = 1
    if strategy.startswith(MEGATRON):
        shared = math.prod(count(keys, f"{section}.{CONFIG}.{theirs}") for theirs in _PARALLEL.values())
    elif strategy.startswith((SHARDED, DEEPSPEED)):
        shared = count(keys, f"{section}.model_args.ulysses_size")
    return max(1, len(device_ids(keys, section)) // shared)


def _their_name(family: str, ours: str) -> str:
    return _PARALLEL[ours] if family == MEGATRON else "ulysses_size"


def options(keys: Reader, role: str, section: str, strategy: str | None) -> dict[str, Any]:
    """Return the written strategy_config for the engine; options that its engine does not read are reported."""
    family = (strategy or "").rpartition("_")[0] or strategy or "native"
    policy = keys["actor_train.strategy_args.strategy_name"].removesuffix("_train") if role == "reference" else family
    fields = {}
    for name, value in written_config(keys, section).items():
        key = f"{section}.{CONFIG}.{name}"
        row = keys.ledger.by_name.get(key)
        if row is not None and row.status != "mapped":  # reported with every other key
            continue
        if family != policy:
            keys.ignore(key, f"the reference runs in the policy's engine, {policy}")
            continue
        reader = READERS.get(name, family)
        if name in _SPECIAL and role != "reference":
            if not (name == "tensor_parallel_size" and role == "rollout") and family != MEGATRON:
                keys.ignore(key, f"read by megatron_train only, and this is {strategy}")
            continue
        if reader != family and family not in ("native", ONE_PROCESS):
            keys.ignore(key, f"{reader} reads it, and this is {strategy}")
            continue
        if name in _SAVING:
            if role == "policy":
                field, of = _SAVING[name]
                fields[field] = of(value)
            continue
        guess = "" if key in keys.ledger.by_name else next(iter(keys.ledger.nearest(key)), "")
        # A slip is reported with every other key
        if guess.startswith(section) and not (one_slip(key, guess) or short_of(key, guess)):
            keys.warn(f"{key} is handed to {family} as it is, at {keys.sources.where(key)} (did you mean {guess}?)")
        if name == "fsdp_size" and value == 1:  # ROLL's word for all of them
            value = -1
        if name == "recompute_modules" and isinstance(value, str):
            value = [module.strip() for module in value.split(",") if module.strip()]
        fields[f"{role}.engine_options.{name}"] = value
    return fields


def _sampler(keys: Reader, ids: list[int]) -> dict[str, Any]:
    """Engine and parallel size of the sampler."""
    strategy = keys["actor_infer.strategy_args.strategy_name"]
    engine = ENGINES.get(strategy, strategy) or "native"
    fields = {"rollout.engine": engine} | options(keys, "rollout", "actor_infer", strategy)
    each, tp = count(keys, "actor_infer.num_gpus_per_worker"), keys[f"actor_infer.{CONFIG}.tensor_parallel_size"]
    pp = keys[f"actor_infer.{CONFIG}.pipeline_parallel_size"] or 1
    size_key, tp_key = "actor_infer.num_gpus_per_worker", f"actor_infer.{CONFIG}.tensor_parallel_size"
    if engine in ("native", "hf") and each == 1:
        keys.ignore(tp_key, f"{engine} does not split the model; vllm and sglang do")
        return fields
    if engine == "vllm":
        worker = (tp or 1) * pp
        if keys.written(size_key) and each != worker:
            keys.ignore(size_key, f"vllm takes tensor_parallel_size x pipeline_parallel_size = {worker}, in ROLL too")
        size_key = tp_key
        fields["rollout.tensor_parallel"] = tp or 1
    else:
        worker = each
        fields["rollout.tensor_parallel"] = tp or each
        if engine == "sglang" and (tp or each) * pp % each:
            keys.problem(
                f"SGLang's {tp or each} x {pp} devices of one copy are no multiple of num_gpus_per_worker={each}",
                key=size_key, fix=f"use {size_key}={(tp or each) * pp}",
            )  # fmt: skip
            return fields
    if len(ids) % worker:
        fits = [one for one in range(min(worker, len(ids)), 0, -1) if len(ids) % one == 0]
        keys.problem(
            f"the {len(ids)} device{'s' * (len(ids) > 1)} of actor_infer do not split into workers of {worker}",
            key=size_key,
            fix=f"use {size_key}={fits[0]}, or {-(-len(ids) // worker) * worker} devices",
        )
    copies = keys[f"actor_infer.{CONFIG}.data_parallel_size"]
    if engine == "vllm" and copies is not None and copies != len(ids) // worker:
        key = f"actor_infer.{CONFIG}.data_parallel_size"
        keys.problem(f"{key} is {copies}, and actor_infer has {len(ids) // worker} workers", key=key,
                     fix=f"use {len(ids) // worker}, or remove it")  # fmt: skip
    return fields


def _check_megatron(keys: Reader, section: str) -> None:
    at = f"{section}.{CONFIG}"
    if keys[f"{at}.variable_seq_lengths"] and keys[f"{at}.moe_token_dispatcher_type"] == "allgather":
        keys.problem("variable_seq_lengths does not go with moe_token_dispatcher_type=allgather",
                     key=f"{at}.variable_seq_lengths", fix=f"use {at}.moe_token_dispatcher_type=alltoall")  # fmt: skip


def _check_fsdp(keys: Reader, section: str, ulysses: int) -> None:
    key = f"{section}.{CONFIG}.fsdp_size"
    if keys.written(key) and 1 < keys[key] < ulysses:
        keys.problem(f"fsdp_size is {keys[key]}, less than ulysses_size={ulysses}", key=key, fix=f"use {key}={ulysses}")


def _check_stage(keys: Reader, section: str) -> None:
    key = f"{section}.{CONFIG}.zero_optimization.stage"
    if keys.written(key) and keys[key] < 1:
        keys.problem(f"deepspeed_train needs a ZeRO stage above 0, and it is {keys[key]}", key=key,
                     fix="use stage 2 or 3, such as strategy_config: ${deepspeed_zero2}")  # fmt: skip


def _check_inference_stage(keys: Reader) -> None:
    key = f"reference.{CONFIG}.zero_optimization.stage"
    if keys["reference.strategy_args.strategy_name"] == "deepspeed_infer" and keys.written(key) and keys[key] != 3:
        keys.problem(f"deepspeed_infer needs ZeRO stage 3, and it is {keys[key]}", key=key,
                     fix="use strategy_config: ${deepspeed_zero3}")  # fmt: skip
