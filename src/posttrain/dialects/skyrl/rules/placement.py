"""Devices: which model stands where, and how many copies of it there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.config.placement import MOST_DEVICES
from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import get, name_of
from posttrain.dialects.skyrl.rules.servers import addresses
from posttrain.dialects.skyrl.strategies import MEGATRON
from posttrain.plan.engine import engine_called

_PLACE = "trainer.placement"
_ENGINES, _TENSOR = "generator.num_inference_engines", "generator.inference_engine_tensor_parallel_size"
ROLES = {"policy": "policy", "critic": "critic", "ref": "reference"}  # SkyRL's name -> ours


@dataclass(frozen=True, slots=True)
class Group:
    """The devices of a model."""

    nodes: int
    per_node: int

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes != 1)} x {self.per_node} = {self.devices}"


def placement(keys: Reader, *, has_critic: bool, has_reference: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """The fields, and the number of copies (data-parallel size) of every model the run has. A critic with a path counts for
    the second also where the estimator does not use it, as SkyRL checks its sizes then too."""
    checked = [
        role
        for role in ROLES
        if role == "policy"
        or (role == "ref" and has_reference)
        or (role == "critic" and (has_critic or keys["trainer.critic.model.path"]))
    ]
    groups = {role: _group(keys, role) for role in checked}
    copies = {ROLES[role]: _copies(keys, role, group) for role, group in groups.items()}
    for role in ("critic", "ref"):
        if role not in groups:
            for count in ("nodes", "gpus_per_node"):
                keys.ignore(f"{_PLACE}.{role}_num_{count}", f"this run has no {ROLES[role]}")
    if not has_critic:
        groups.pop("critic", None)
    fields = _parallel(keys, groups) | _engines(keys, groups)
    if keys[f"{_PLACE}.colocate_all"]:
        keys.ignore(f"{_PLACE}.colocate_policy_ref", "colocate_all is true")
        return fields | _together(keys, groups), copies
    return fields | _side_by_side(keys, groups), copies


def _group(keys: Reader, role: str) -> Group:
    sizes = []
    for count in ("nodes", "gpus_per_node"):
        key = f"{_PLACE}.{role}_num_{count}"
        if keys[key] < 1:
            keys.problem(f"{key} must be at least 1, not {keys[key]}", key=key, fix=f"use {key}=1, or more")
        sizes.append(max(1, keys[key]))
    return Group(*sizes)


def _copies(keys: Reader, role: str, group: Group) -> int:
    """Devices over those that share a sequence or the model."""
    key = f"trainer.{role}.sequence_parallel_size"
    shared = keys[key]
    if shared < 1:
        keys.problem(f"{key} must be at least 1, not {shared}", key=key, fix=f"use {key}=1")
        return group.devices
    if group.devices % shared:
        fits = max(size for size in range(1, min(shared, group.devices) + 1) if group.devices % size == 0)
        what = f"{group.devices} devices of the {ROLES[role]} ({group}) do not split into groups of {shared}"
        keys.problem(what, key=key, fix=f"use {key}={fits}")
        return group.devices
    packing = name_of(keys, "trainer.use_sample_packing")
    if shared > 1 and not get(keys, "trainer.use_sample_packing"):
        what = f"{shared} devices share a sequence ({key}), which needs packed sequences"
        keys.problem(what, key=packing, fix=f"use {packing}=true, or {key}=1")
    copies = group.devices // shared
    if role == "policy":
        split = _megatron(keys)
        if copies % split:
            key = max((*_SPLITS, _CONTEXT), key=lambda key: int(get(keys, key)))
            what = f"{group.devices} devices do not split into groups of {shared * split} that share a model"
            keys.problem(what, key=key, fix="use sizes whose product divides the devices")
        else:
            copies //= split
    return copies


def _megatron(keys: Reader) -> int:
    if keys["trainer.strategy"] != MEGATRON:
        return 1
    split = 1
    for key in (*_SPLITS, _CONTEXT):
        split *= max(1, get(keys, key))
    return split


_CONTEXT = "trainer.policy.megatron_config.context_parallel_size"
_SPLITS = {
    "trainer.policy.megatron_config.tensor_model_parallel_size": "policy.tensor_parallel",
    "trainer.policy.megatron_config.pipeline_model_parallel_size": "policy.pipeline_parallel",
}


def _parallel(keys: Reader, groups: dict[str, Group]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        f"{ROLES[role]}.sequence_parallel": keys[f"trainer.{role}.sequence_parallel_size"]
        for role in groups
        if role != "ref"
    }
    if keys["trainer.strategy"] == MEGATRON:
        ulysses = "trainer.policy.sequence_parallel_size"
        if keys[ulysses] > 1:
            what = f"{MEGATRON} shares sequences by context_parallel_size, and {ulysses} is {keys[ulysses]}"
            keys.problem(what, key=ulysses, fix=f"use {ulysses}=1, and {_CONTEXT}={keys[ulysses]}")
        fields["policy.sequence_parallel"] = get(keys, _CONTEXT)
        return fields | {field: get(keys, key) for key, field in _SPLITS.items()}
    for key in (*_SPLITS, _CONTEXT, "trainer.policy.megatron_config"):
        keys.ignore(key, f"trainer.strategy is {keys['trainer.strategy']}")
    return fields


def _engines(keys: Reader, groups: dict[str, Group]) -> dict[str, Any]:
    """Training engines, and the sampler's size."""
    fields: dict[str, Any] = {
        f"{role}.engine": engine_called(keys["trainer.strategy"], devices=groups[role].devices)
        for role in ("policy", "critic")
        if role in groups
    }
    if _samples_here(keys):
        backend = get(keys, "generator.backend")
        if keys[f"{_PLACE}.colocate_all"]:
            for name in (_ENGINES, _TENSOR):
                keys.ignore(name_of(keys, name), f"{backend} samples from the policy's own weights, where they are")
        else:
            keys.ignore(name_of(keys, _TENSOR), f"{backend} has a copy of the weights on each device")
    else:
        fields["rollout.tensor_parallel"] = get(keys, _TENSOR)
    return fields


def _samples_here(keys: Reader) -> bool:
    """Return the sampler inside this program's processes, a copy per device; it uses the policy's weights where they are."""
    return get(keys, "generator.backend") in ("native", "hf")


_OF_SAMPLERS = {
    _ENGINES: "copies",
    _TENSOR: "tensor",
    "generator.inference_engine_pipeline_parallel_size": "pipeline",
    "generator.inference_engine_data_parallel_size": "data",
}


def _sampler_devices(keys: Reader) -> tuple[int, str]:
    """Copies of the sampler x devices of a copy; with the product in words."""
    sizes = {name: get(keys, name) for name in _OF_SAMPLERS}
    for name, size in sizes.items():
        if size < 1:
            written = name_of(keys, name)
            keys.problem(f"{written} must be at least 1, not {size}", key=written, fix=f"use {written}=1, or more")
    shown = [f"{size} {_OF_SAMPLERS[name]}" for name, size in sizes.items() if size != 1 or name in (_ENGINES, _TENSOR)]
    product = 1
    for size in sizes.values():
        product *= max(1, size)
    return product, f"{' x '.join(shown)} = {product}"


def _sampler_copies(keys: Reader) -> int:
    """Return the copies of a sampler with one device per copy: the number of devices of the configured engines, where the devices
    per engine are written (SkyRL's 4 is for its own engines)."""
    tensor = name_of(keys, _TENSOR)
    sizes = [get(keys, _ENGINES), get(keys, _TENSOR) if keys.written(tensor) else 1]
    for name, size in zip((_ENGINES, _TENSOR), sizes, strict=True):
        if size < 1:
            written = name_of(keys, name)
            keys.problem(f"{written} must be at least 1, not {size}", key=written, fix=f"use {written}=1, or more")
    return max(1, sizes[0]) * max(1, sizes[1])


def _differ(keys: Reader, what: str, *, key: str, fix: str) -> None:
    """Report roles on different numbers of devices, unless a number itself is wrong, whose default stands in."""
    if not any(each.startswith((f"{_PLACE}.", "generator.")) for each in keys.bad):
        keys.problem(what, key=key, fix=fix)


def _together(keys: Reader, groups: dict[str, Group]) -> dict[str, Any]:
    """colocate_all: every model and the sampler on all devices."""
    policy = groups["policy"]
    key = f"{_PLACE}.colocate_all"
    if not _samples_here(keys):
        devices, product = _sampler_devices(keys)
        # With --here one device has all of both
        if devices != policy.devices and not (keys.here and policy.devices == 1):
            engines, tensor = name_of(keys, _ENGINES), max(1, devices // max(1, get(keys, _ENGINES)))
            fits = [f"{_PLACE}.policy_num_gpus_per_node={devices // policy.nodes}"] * (devices % policy.nodes == 0)
            if policy.devices % tensor == 0:
                fits.insert(0, f"{engines}={policy.devices // tensor}")
            _differ(
                keys,
                f"colocate_all puts policy and sampler on the same devices: the policy has {policy}, the sampler {product}",
                key=key,
                fix=f"use {', or '.join([*fits, f'{key}=false'])}",
            )
    for role in ("ref", "critic"):
        if role in groups and groups[role].devices != policy.devices:
            _differ(
                keys,
                f"colocate_all puts policy and {ROLES[role]} on the same devices: the policy has {policy}, the "
                f"{ROLES[role]} {groups[role]}",
                key=f"{_PLACE}.{role}_num_gpus_per_node",
                fix=f"use {_PLACE}.{role}_num_gpus_per_node={policy.per_node} with {_PLACE}.{role}_num_nodes="
                f"{policy.nodes}",
            )
    return {"placement.nodes": policy.nodes, "placement.devices": policy.devices}


def _side_by_side(keys: Reader, groups: dict[str, Group]) -> dict[str, Any]:
    """Groups of devices in the order policy, reference, critic, sampler; numbered from 0."""
    policy = groups["policy"]
    fields: dict[str, Any] = {"policy.devices": list(range(policy.devices))}
    used = policy.devices
    nodes = policy.nodes
    for role in ("ref", "critic"):
        if role not in groups:
            continue
        group = groups[role]
        if role == "ref" and keys[f"{_PLACE}.colocate_policy_ref"]:
            if group != policy:
                _differ(
                    keys,
                    f"colocate_policy_ref puts policy and reference on the same devices: the policy has {policy}, the "
                    f"reference {group}",
                    key=f"{_PLACE}.colocate_policy_ref",
                    fix=f"use {_PLACE}.ref_num_gpus_per_node={policy.per_node} with {_PLACE}.ref_num_nodes="
                    f"{policy.nodes}, or {_PLACE}.colocate_policy_ref=false",
                )
            fields["reference.devices"] = fields["policy.devices"]
            continue
        fields[f"{ROLES[role]}.devices"] = list(range(used, used + group.devices))
        used += group.devices
        nodes = max(nodes, group.nodes)
    if not addresses(keys):
        devices = _sampler_copies(keys) if _samples_here(keys) else _sampler_devices(keys)[0]
        if devices > MOST_DEVICES:
            key = name_of(keys, max(_OF_SAMPLERS, key=lambda key: int(get(keys, key))))
            keys.problem(f"the samplers would have {devices} devices", key=key, fix=f"use {key}=1, for example")
            devices = 1
        fields["rollout.devices"] = list(range(used, used + devices))
        used += devices
    if used == policy.devices:  # nothing stands beside the policy
        fields = {}
    nodes = next(count for count in range(nodes, used + 1) if used % count == 0)
    return fields | {"placement.nodes": nodes, "placement.devices": used}
