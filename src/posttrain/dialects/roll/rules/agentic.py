"""Agentic pipelines are planned: what can be said about their sizes, and enough fields for a plan."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reading import Reader


def agentic(keys: Reader) -> dict[str, Any]:
    """Fields that stand in for data and rewards, which environments take the place of."""
    keys.plan_only(
        "this is ROLL's agentic pipeline (custom_envs, train_env_manager), which is planned", key=_first(keys),
        fix="RLVR pipelines, which have rewards and data_args.file_name, run today",
    )  # fmt: skip
    for section in ("train_env_manager", "val_env_manager"):
        _check_groups(keys, section)
    tags = keys["train_env_manager.tags"]
    return {"data.train_files": [f"environment {tag}" for tag in tags] or ["environment"], "data.prompts_per_step": 1}


def _first(keys: Reader) -> str:
    return next(key for key in ("custom_envs", "train_env_manager", "val_env_manager") if keys.written(key))


def _check_groups(keys: Reader, section: str) -> None:
    """Groups must be shared out among tags, and a step must be whole groups."""
    groups_key = f"{section}.env_groups" if keys.written(f"{section}.env_groups") else f"{section}.num_env_groups"
    parts_key = f"{section}.n_groups" if keys.written(f"{section}.n_groups") else f"{section}.num_groups_partition"
    groups, parts, size = keys[groups_key], keys[parts_key], keys[f"{section}.group_size"]
    if keys.written(groups_key) and isinstance(parts, list) and sum(parts) != groups:
        keys.problem(f"{parts_key} adds up to {sum(parts)}, and there are {groups} groups", key=parts_key,
                     fix=f"use parts that add up to {groups}, one per tag")  # fmt: skip
    validates = section == "val_env_manager"
    step_key = "val_batch_size" if validates else "rollout_batch_size"
    step, whole = keys[step_key], size * groups if validates else size
    if not keys.written(section) or step < 0 or whole < 1:
        return
    if step % whole:
        keys.problem(f"{step_key}={step} does not divide into groups: {whole} trajectories at a time", key=step_key,
                     fix=f"use {step_key}={-(-step // whole) * whole}")  # fmt: skip
    most, needed = keys[f"{section}.max_traj_per_env"], -(-step // max(1, groups * size))
    if 0 <= most < needed:
        keys.problem(f"{section}.max_traj_per_env is {most}, and a step needs {needed} of every environment",
                     key=f"{section}.max_traj_per_env", fix=f"use {needed}, or -1")  # fmt: skip
