"""Runners of skyrl-agent in the place of verl's manager (the environment skyrl_agent): fields that the task's file sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from posttrain.dialects.plugged import RUNNER
from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import value_at
from posttrain.dialects.verl.rules.names import MODEL, ROLLOUT
from posttrain.dialects.words import OUR_SECTION

_OURS = f"{OUR_SECTION}.environment"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def agent_runner(keys: Reader) -> dict[str, Any]:
    """The fields of a run whose episodes such a runner plays; nothing for another run."""
    if value_at(keys.values, f"{_OURS}.name") != RUNNER:
        return {}
    keys.warn(
        f"skyrl-agent plays the episodes that {_task_of(keys)} describes, in a Python that has it, and returns their rewards"
    )
    found: dict[str, Any] = {
        "environment.settings.model": keys[f"{MODEL}.path"],
        "environment.max_turns": None,
        "environment.max_context_tokens": keys["data.max_prompt_length"] + keys["data.max_response_length"],
        "environment.conversation": "messages",
        "reward.terms": [],
        "data.extra_columns": ["*"],
    }
    described = {} if keys.skip_files else _described(keys)
    generator = _section(described, "generator")
    count, asked = generator.get("num_trajectories"), keys[f"{ROLLOUT}.n"]
    if count is not None and count != asked:
        what = f"{_task_of(keys)} has num_trajectories={count}, and the command {asked}: skyrl-agent ends here, too"
        keys.problem(what, key="skyrl_agent.num_trajectories", fix=f"use skyrl_agent.num_trajectories={count}")
    validation = _section(generator, "val_config")
    for section, given in (("rollout", generator), ("validation", validation)):
        sampling = _section(given, "sampling_params")
        for name in _SAMPLING:
            if sampling.get(name) is not None:
                value = sampling[name]
                found[f"{section}.{name}"] = max(value, 0) if name == "top_k" else value
        if stop := sampling.get("stop"):
            found[f"{section}.stop"] = [stop] if isinstance(stop, str) else list(stop)
    if validation.get("num_trajectories") is not None:
        found["validation.samples_per_prompt"] = validation["num_trajectories"]
    return found


def _task_of(keys: Reader) -> str:
    return str(value_at(keys.values, f"{_OURS}.settings.task"))


def _described(keys: Reader) -> dict[str, Any]:
    """The task's file; empty where it cannot be read, which the plan reports."""
    folder, task = (Path(str(value_at(keys.values, f"{_OURS}.settings.{name}"))) for name in ("folder", "task"))
    path = task if task.is_file() else folder / task
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except yaml.YAMLError as error:
        keys.problem(f"{path} cannot be read: {error}", key=f"{_OURS}.settings.task")
        return {}
    return found if isinstance(found, dict) else {}


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, dict) else {}
