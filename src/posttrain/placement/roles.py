"""Which model of a run sits on which devices, how it is split there, and when it makes room for another."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config import RunConfig
from posttrain.errors import Problem
from posttrain.placement.batch import needs_values, split_over


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlacement:
    """One role's place."""

    role: str  # policy, critic, reference, reward model, rollout
    devices: tuple[int, ...]  # numbers, 0 first
    copies: int  # data-parallel size: each copy works on other sequences
    devices_per_copy: int  # tensor x sequence x pipeline parallel size
    shared_with: tuple[str, ...]  # roles on some of the same devices
    awake: str  # the phases it is needed in


def place_roles(config: RunConfig) -> tuple[list[RolePlacement], list[Problem]]:
    """Every role of the run, in the order a step needs them, or why they do not fit on the devices."""
    every = tuple(range(config.placement.devices))
    policy, critic, rollout = config.policy, config.critic, config.rollout
    asked = [
        ("rollout", rollout.devices, rollout.tensor_parallel, "rollout"),
        ("policy", policy.devices, split_over(policy), "log-probs, update"),
    ]
    if config.loss.kl_coef or config.reward.kl.coef:
        asked.append(("reference", config.reference.devices, split_over(policy), "log-probs"))
    if needs_values(config.advantage.name):
        asked.append(("critic", critic.devices, split_over(critic), "values, update"))
    if config.reward.model is not None:
        asked.append(("reward model", config.reward.model.devices, 1, "reward"))
    problems = []
    for role, devices, split, _ in asked:
        problems += _problems(config, role, devices, split)
    if config.placement.devices % config.placement.nodes:
        what = f"{config.placement.devices} devices do not spread evenly over {config.placement.nodes} nodes"
        problems.append(Problem(what, fix="use a multiple", field="placement.devices"))
    if problems:
        return [], problems
    where = {role: tuple(devices) if devices is not None else every for role, devices, _, _ in asked}
    return [
        RolePlacement(
            role=role,
            devices=where[role],
            copies=len(where[role]) // split,
            devices_per_copy=split,
            shared_with=tuple(other for other in where if other != role and set(where[other]) & set(where[role])),
            awake=awake,
        )
        for role, _, split, awake in asked
    ], []


def _problems(config: RunConfig, role: str, devices: list[int] | None, split: int) -> list[Problem]:
    field = f"{role.replace('reward model', 'reward.model')}.devices"
    total = config.placement.devices
    if devices is not None and not devices:
        return [Problem(f"the {role} has no device", fix="name at least one", field=field)]
    wrong = [number for number in devices or [] if number not in range(total)]
    if wrong:
        what = f"the {role} is put on device {wrong[0]}, and there are {total} devices, 0 to {total - 1}"
        return [Problem(what, fix=f"use placement.devices={max(wrong) + 1}, or other devices", field=field)]
    if devices is not None and len(set(devices)) < len(devices):
        return [Problem(f"the {role} is put on the same device twice", fix="name each once", field=field)]
    count = total if devices is None else len(devices)
    if count % split:
        name = {"rollout": "rollout.tensor_parallel", "reference": "policy.tensor_parallel"}.get(
            role, f"{role}.tensor_parallel"
        )
        sizes = "tensor_parallel" if role == "rollout" else "sequence_parallel x tensor_parallel x pipeline_parallel"
        what = f"the {role} has {count} devices, which are no multiple of the {split} that share one copy ({sizes})"
        fix = f"use {-(-count // split) * split} devices" + (f", or {name}={count}" if split > count else "")
        return [Problem(what, fix=fix, field=name)]
    return []
