"""Devices: how many, which engines, how many share a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules import recipes
from posttrain.dialects.verl.rules.look import MEGATRONS_SIZES, engine_options, get, kind_of_device, megatron_options
from posttrain.dialects.verl.rules.names import ACTOR, FREEZE_ROUTER, MODEL, ROLLOUT
from posttrain.dialects.verl.rules.reward_server import REWARD_MODELS, enabled_section, judge_section, pool_of
from posttrain.dialects.verl.strategies import MEGATRON, MINDSPEED, OTHERS, SECTIONS, SHARDED, SHARDED_TEXT
from posttrain.plan.engine import engine_called
from posttrain.plan.engines.megatron.experts import EXPERTS_OVER, ONE_EXPERT_OVER

# Parallel sizes here, and Megatron's names for them
_DEVICES_PER_NODE = 8  # at most, where pools do not say more
JUDGE = "reward.served"  # of the model that the user's reward function asks
TEACHERS = "distillation"  # the section with the pool of all teachers


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Devices of the run, and how many copies of a model they hold (data-parallel size)."""

    devices: int  # of what is trained
    reward_model_devices: int
    actor_copies: int
    critic_copies: int
    sequence_parallel: int  # of the actor
    critic_sequence_parallel: int
    teacher_devices: tuple[int, ...] = ()  # of the teachers alone; none where they work beside the policy


def layout(keys: Reader, *, has_critic: bool) -> tuple[Layout, dict[str, Any]]:
    """Complains about devices that cannot be shared out."""
    nodes, per_node = keys["trainer.nnodes"], keys["trainer.n_gpus_per_node"]
    devices = max(1, nodes * per_node)
    fields: dict[str, Any] = {"placement.nodes": nodes, "placement.devices": nodes * per_node}
    if keys.ledger.find("trainer.device") and keys.written("trainer.device"):
        fields["placement.device"] = kind_of_device(keys)
    _check_strategies(keys, has_critic=has_critic)
    actor_split = _role(keys, fields, "policy", ACTOR, MODEL, devices)
    critic_split = actor_split
    if has_critic:
        critic_split = _role(keys, fields, "critic", "critic", "critic.model", devices)
        if keys[f"{ACTOR}.strategy"] == keys["critic.strategy"] == MEGATRON:
            critic_split = _as_the_policy_is(keys, fields, actor_split, critic_split)
    apart = _pools(keys, fields, devices, has_critic=has_critic)
    fields |= _sampler(keys, len(apart.get("rollout", range(devices))))
    return Layout(
        devices=devices,
        reward_model_devices=len(apart.get(JUDGE, apart.get("reward.model", range(devices)))),
        actor_copies=max(1, devices // actor_split[0]),
        critic_copies=max(1, devices // critic_split[0]),
        sequence_parallel=actor_split[1],
        critic_sequence_parallel=critic_split[1],
        teacher_devices=tuple(apart.get(TEACHERS, ())),
    ), fields


def _pools(keys: Reader, fields: dict[str, Any], devices: int, *, has_critic: bool) -> dict[str, range]:
    """Devices beside the trainer's, which come first; those of a pool are numbered on. Sets everybody's places when there are
    any, but for those of teachers. Returns the devices of the pools by our role."""
    found: dict[str, tuple[int, int]] = {}  # nodes, and devices of each
    judge, model = judge_section(keys), enabled_section(keys)
    scored_by = JUDGE if judge is not None else "reward.model"
    if model is not None and pool_of(keys, model) is not None:
        found[scored_by] = _pool(keys, model)
    else:
        for section in REWARD_MODELS:
            for name in ("nnodes", "n_gpus_per_node"):
                keys.ignore(f"{section}.{name}", f"{section}.enable_resource_pool, or {section}.enable, is not true")
    if recipes.has_own_devices(keys):
        found["rollout"] = _pool(keys, recipes.POOL)
    elif get(keys, f"{ROLLOUT}.nnodes", 1) != 0 and any(
        get(keys, f"{ROLLOUT}.{name}") for name in ("nnodes", "n_gpus_per_node")
    ):
        found["rollout"] = _pool(keys, ROLLOUT)
    if get(keys, f"{TEACHERS}.enabled") and get(keys, f"{TEACHERS}.nnodes"):
        found[TEACHERS] = _pool(keys, TEACHERS)
    if not found:
        return {}
    for role in ("policy", "reference", *(["critic"] if has_critic else []), "rollout"):
        fields[f"{role}.devices"] = list(range(devices))
    used = devices
    placed: dict[str, range] = {}
    for role, (count, each) in found.items():
        size = count * each
        placed[role] = range(used, used + size)
        if role != TEACHERS:
            fields[f"{role}.devices"] = list(placed[role])
        used += size
    if model is not None and scored_by not in found:
        fields[f"{scored_by}.devices"] = list(range(devices))
    fields["placement.devices"] = used
    nodes = _nodes([(max(1, keys["trainer.nnodes"]), keys["trainer.n_gpus_per_node"]), *found.values()])
    fields["placement.nodes"] = next(count for count in range(nodes, used + 1) if used % count == 0)
    return placed


def _nodes(pools: list[tuple[int, int]]) -> int:
    """The nodes of the trainer and of pools beside it, which share them where a node has room for all."""
    together = sum(each for _, each in pools)
    counts = [count for count, _ in pools]
    largest = max(_DEVICES_PER_NODE, *(each for _, each in pools))
    return counts[0] if together <= largest else sum(counts)


def _pool(keys: Reader, section: str) -> tuple[int, int]:
    """The nodes of a pool of its own, and the devices of each."""
    sizes = {name: keys.section(section).get(name) for name in ("nnodes", "n_gpus_per_node")}
    for name, size in sizes.items():
        if not size or size < 1:
            key, other = (f"{section}.{each}" for each in (name, *(each for each in sizes if each != name)))
            what = f"{section} has devices of its own, and {key} is {'not given' if size is None else size}"
            keys.problem(what, key=key if keys.written(key) else other, fix=f"use {key}=1, or more")
    return max(1, sizes["nnodes"] or 1), max(1, sizes["n_gpus_per_node"] or 1)


def _check_strategies(keys: Reader, *, has_critic: bool) -> None:
    actor, critic = keys[f"{ACTOR}.strategy"], keys["critic.strategy"]
    if keys.ledger.version in ("0.1", "0.2") and actor not in (SHARDED[0], MEGATRON):
        what = f"verl {keys.ledger.version} has no strategy {actor}"
        keys.problem(what, key=f"{ACTOR}.strategy", fix=f"use {SHARDED[0]}, or a later verl: --dialect verl")
    if has_critic and (actor == MEGATRON) != (critic == MEGATRON):
        keys.problem(
            f"actor and critic must be trained by engines of one family, and they are {actor} and {critic}",
            key="critic.strategy" if keys.written("critic.strategy") else f"{ACTOR}.strategy",
            fix=f"use critic.strategy={actor}",
        )


def _role(keys: Reader, fields: dict[str, Any], role: str, section: str, model: str, devices: int) -> tuple[int, int]:
    """Sets the engine and parallel sizes of a trained role. Returns devices per copy, and those that share a sequence."""
    strategy = keys[f"{section}.strategy"]
    fields[f"{role}.engine"] = engine_called(strategy, devices=devices)
    ulysses = f"{section}.ulysses_sequence_parallel_size"
    sharding = f"{section}.fsdp_config" if role == "policy" else f"{model}.fsdp_config"
    if strategy == MEGATRON:
        place = f"{section}.{MINDSPEED if keys.written(f'{section}.{MINDSPEED}') else MEGATRON}"
        sizes = {name: f"{place}.{key}" for name, key in MEGATRONS_SIZES.items()}
        keys.ignore(sharding, f"read by {SHARDED_TEXT} only")
        keys.ignore(ulysses, f"read by {SHARDED_TEXT} only; Megatron's is megatron.context_parallel_size")
        others = megatron_options(keys, section)
        if role == "policy" and get(keys, FREEZE_ROUTER):
            others["freeze_moe_router"] = True
        fields[f"{role}.engine_options"] = others
        _check_shuffle(keys, section)
    elif strategy in OTHERS:
        sizes = _other_sizes(keys, fields, role, section, devices)
        place = OTHERS[strategy].section
        if fields[f"{role}.engine"] != MEGATRON:
            fields |= engine_options(keys, f"{section}.{place}" if place else sharding, f"{role}.engine_options")
        keys.ignore(ulysses, f"{strategy} reads {sizes['sequence_parallel']}")
        ulysses = sizes["sequence_parallel"]
    else:
        sizes = {"sequence_parallel": ulysses}
        fields |= engine_options(keys, sharding, f"{role}.engine_options")
        size = f"{sharding}.fsdp_size"
        if keys.ledger.version == "0.2" and keys[size] != -1:
            keys.problem("verl 0.2 cannot shard over a part of the devices", key=size, fix=f"use {size}=-1")
        for key in (
            f"{section}.megatron",
            *([FREEZE_ROUTER] if role == "policy" else []),
        ):
            keys.ignore(key, f"read by the strategy {MEGATRON} only, and this is {strategy}")
    split = 1
    for name, key in sizes.items():
        size = get(keys, key, 1)
        fields[f"{role}.{name}"] = size
        split *= max(1, size)
    shared = get(keys, sizes["sequence_parallel"], 1)
    if devices % split and not _has_all(keys, devices):
        product = " x ".join(str(get(keys, key, 1)) for key in sizes.values())
        key = max(sizes.values(), key=lambda key: int(get(keys, key, 1)))
        fits = [size for size in range(min(split, devices), 0, -1) if devices % size == 0]
        keys.problem(
            f"{devices} devices do not split into groups of {product if len(sizes) > 1 else split} that share a model",
            key=key,
            fix=f"use {key}={fits[0]}"
            if len(sizes) == 1
            else f"use sizes whose product divides {devices}, such as {fits[0]}",
        )
        split = shared = 1
    if shared > 1 and strategy != MEGATRON and not keys[f"{model}.use_remove_padding"]:
        keys.problem(
            f"{shared} devices share a sequence, which needs packed sequences",
            key=ulysses,
            fix=f"use {model}.use_remove_padding=True, or {ulysses}=1",
        )
    return split, shared


def _as_the_policy_is(
    keys: Reader, fields: dict[str, Any], policy: tuple[int, int], critic: tuple[int, int]
) -> tuple[int, int]:
    """Split the critic as the policy, beside which it lies: megatron-core's groups exist once in a process, and no number depends
    on them. Returns devices per copy, and those that share a sequence."""
    place = f"critic.{MINDSPEED if keys.written(f'critic.{MINDSPEED}') else MEGATRON}"
    ours, theirs = (fields[f"{role}.engine_options"] for role in ("critic", "policy"))
    different = [name for name in MEGATRONS_SIZES if 1 <= fields[f"critic.{name}"] != fields[f"policy.{name}"]]
    split = [f"{place}.{MEGATRONS_SIZES[name]}" for name in different]
    split += [f"{place}.{name}" for name in (EXPERTS_OVER, ONE_EXPERT_OVER) if ours.get(name) != theirs.get(name)]
    if not split:
        return critic
    fields |= {f"critic.{name}": fields[f"policy.{name}"] for name in different}
    fields["critic.engine_options"] = {
        **{name: value for name, value in ours.items() if name not in (EXPERTS_OVER, ONE_EXPERT_OVER)},
        **{name: theirs[name] for name in (EXPERTS_OVER, ONE_EXPERT_OVER) if name in theirs},
    }
    keys.warn(
        f"{', '.join(split)}: the critic is split as the policy is, on whose devices it is trained; that changes no number"
    )
    return policy


def _has_all(keys: Reader, devices: int) -> bool:
    """Return True where --here gives a whole model to one device, and the cluster's own number of devices is 1 or not written: a
    script may leave it to a variable."""
    counts = ("trainer.nnodes", "trainer.n_gpus_per_node")
    return keys.here and (devices == 1 or not all(keys.written(key) and key not in keys.open for key in counts))


def _other_sizes(keys: Reader, fields: dict[str, Any], role: str, section: str, devices: int) -> dict[str, str]:
    """Return the keys of the parallel sizes of an engine that shards as FSDP2 does, and set the engine here: the one that shards,
    or Megatron where layers are split."""
    other = OTHERS[keys[f"{section}.strategy"]]
    place = f"{section}.{other.section or SECTIONS[role]}"
    sizes = {"sequence_parallel": f"{place}.{other.sequence}"}
    splits = {"tensor_parallel": other.layer, "pipeline_parallel": other.layers}
    sizes |= {name: f"{place}.{key}" for name, key in splits.items() if key and get(keys, f"{place}.{key}", 1) != 1}
    fields[f"{role}.engine"] = engine_called(MEGATRON if len(sizes) > 1 else SHARDED[0], devices=devices)
    return sizes


def _check_shuffle(keys: Reader, section: str) -> None:
    """Megatron's mini-batches can be shuffled, which asks for a seed; verl 0.3's own file has none."""
    key, seed = f"{section}.shuffle", f"{section}.data_loader_seed"
    if not keys[key]:
        return
    if get(keys, seed) is None and keys.ledger.find(seed) and not keys.in_file(key):
        keys.problem("shuffled mini-batches need a seed", key=key, fix=f"give {seed}=1, or use {key}=False")


def _sampler(keys: Reader, devices: int) -> dict[str, Any]:
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    engine, size = keys[f"{ROLLOUT}.name"], keys[key]
    copies, sharing = f"{ROLLOUT}.data_parallel_size", f"{ROLLOUT}.expert_parallel_size"
    if engine in ("native", "hf"):
        for name in (key, copies, sharing):
            keys.ignore(name, f"{engine} does not split the model; vllm and sglang do")
        return {}
    experts = get(keys, sharing, 1)
    fields: dict[str, Any] = {}
    if experts > 1:
        size *= get(keys, copies, 1)
        fields["rollout.engine_options.inference_engine_expert_parallel_size"] = experts
        if experts != size:
            what = f"{sharing}={experts}, and tensor_model_parallel_size x data_parallel_size = {size} devices share a sampler"
            keys.problem(what, key=sharing, fix=f"use {sharing}={size}, or 1")
    else:
        keys.ignore(copies, "without expert_parallel_size above 1 the copies of a sampler work by themselves")
    if size >= 1 and devices % size and not _has_all(keys, devices):
        fits = next(count for count in range(min(size, devices), 0, -1) if devices % count == 0)
        what = f"{devices} {'device does' if devices == 1 else 'devices do'} not split into samplers of {size} devices each"
        keys.problem(what, key=key, fix=f"use {key}={fits}, or a number of devices that {size} divides")
    return {"rollout.tensor_parallel": size, **fields}
