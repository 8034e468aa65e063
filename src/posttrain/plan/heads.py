"""Divisibility of attention heads: by devices that share a sequence (Ulysses), and by those that share layers."""

from __future__ import annotations

from posttrain.config import RunConfig, TrainingConfig
from posttrain.errors import Problem
from posttrain.plan.model_shape import read_shape
from posttrain.plan.placement import PlacementPlan, RolePlacement


def head_problems(config: TrainingConfig, plan: PlacementPlan) -> list[Problem]:
    """Sizes that do not divide the query heads of a role's model. Models that are not folders here are not looked at.

    Key/value heads may be fewer than the devices: then several devices hold the same one.
    """
    problems = []
    for role in plan.roles:
        if role.role == "reference":  # as the policy
            continue
        critic = config.critic.path if role.role == "critic" and isinstance(config, RunConfig) else None
        path = critic or config.model.path
        shape = read_shape(path)
        if shape is not None and role.role != "reward model":
            problems += _of(role, shape.heads, path)
    return problems


def _of(role: RolePlacement, heads: int, path: str) -> list[Problem]:
    sizes = role.sizes
    shares = [
        (
            "sequence_parallel",
            sizes.sequence * sizes.context * sizes.tensor,
            sizes.sequence * sizes.context,
            "share a sequence",
        ),
        ("tensor_parallel", sizes.tensor, sizes.tensor, "share its layers"),
    ]
    for name, group, size, what in shares:
        if size > 1 and heads % group:
            fits = [one for one in range(1, size) if heads % (group // size * one) == 0]
            field = f"{role.role}.{name}"
            text = f"{path} has {heads} attention heads, which {group} devices that {what} cannot hold in equal parts"
            fix = f"use {field}={fits[-1]}" if fits else f"use {field}=1"
            return [Problem(f"{text} ({heads} / {group} = {heads / group:.4g})", fix=fix, field=field)]
    return []
