"""--here: run a cluster configuration on a single device. Sizes of steps, updates and samples stay unchanged."""

from __future__ import annotations

from typing import Any, TypeVar

from posttrain.config.base import Section
from posttrain.config.judge import JUDGE as JUDGE_NAME
from posttrain.config.judge import judge_field
from posttrain.config.policy import ONE_DEVICE
from posttrain.config.reward import RewardConfig
from posttrain.config.tracking import SERVICES
from posttrain.dialects.ledger import Key
from posttrain.dialects.value_types import type_text
from posttrain.registry import is_installed

# Fields that are 1 on one device, whatever is written.
COUNTS = (
    *("placement.devices", "placement.nodes", "rollout.tensor_parallel"),
    *(f"{role}.devices" for role in ("policy", "reference", "critic", "rollout", "reward.model")),
    *(f"{role}.{size}_parallel" for role in ("policy", "critic") for size in ("sequence", "tensor", "pipeline")),
)
C = TypeVar("C", bound=Section)
S = TypeVar("S", bound=Section)

WANTED: dict[str, dict[str, Any]] = {
    "placement": {"runtime": "auto", "ray_address": None, "device": "auto", "devices": 1, "nodes": 1},
    "policy": {
        "engine": ONE_DEVICE,
        "devices": None,
        "sequence_parallel": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
    },
    "critic": {
        "engine": ONE_DEVICE,
        "devices": None,
        "sequence_parallel": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
    },
    "reference": {"devices": None},
    "rollout": {"engine": "native", "endpoints": [], "weight_sync": "auto", "tensor_parallel": 1, "devices": None},
}
REWARD_MODEL: dict[str, Any] = {"engine": ONE_DEVICE, "engine_options": {}, "devices": None}
JUDGE: dict[str, Any] = {"engine": "native", "engine_options": {}, "devices": None}
SERVED: dict[str, Any] = {"devices": None, "tensor_parallel": 1}
OPTIONS = {
    "policy": ("engine_options",),
    "critic": ("engine_options",),
    "reference": ("engine_options",),
    "rollout": ("engine_options", "engine_sampling"),
    "validation": ("engine_sampling",),
}


def of_devices(row: Key) -> bool:
    """Return True for the row of a key that --here does not need, because it counts devices."""
    return type_text(row.type).startswith("int") and not {*row.fields}.isdisjoint(COUNTS)


def at_hand(config: C) -> tuple[C, list[str]]:
    """The same run on one device: parallel sizes 1, the native sampler, the local training engine, the trackers that
    are installed, and every change in words."""
    changes: list[str] = []
    sections: dict[str, Any] = {}
    held = type(config).model_fields  # not every entry has every section
    for name in [name for name in {**WANTED, **OPTIONS} if name in held]:
        section = getattr(config, name)
        wanted = {
            **WANTED.get(name, {}),
            **{option: {} for option in OPTIONS.get(name, ()) if getattr(section, option, None)},
        }
        wanted |= _pooled_budget(config, name, section)
        different = {key: value for key, value in wanted.items() if getattr(section, key) != value}
        for key, value in different.items():
            changes.append(f"{name}.{key}: {_shown(value)} instead of {_shown(getattr(section, key))}")
        sections[name] = section.model_copy(update=different)
    ahead = getattr(config, "asynchronous", None)
    if ahead and ahead.mode == "separate":
        changes.append("asynchronous.mode: colocate instead of separate")
        sections["asynchronous"] = ahead.model_copy(
            update={"mode": "colocate", "sync_every_steps": 1, "sync_between_tokens": True}
        )
        if not ahead.sync_between_tokens:
            changes.append("asynchronous.sync_between_tokens: True instead of False")
        if ahead.sync_every_steps != 1:
            changes.append(f"asynchronous.sync_every_steps: 1 instead of {ahead.sync_every_steps}")
    reward = getattr(config, "reward", None)
    if isinstance(reward, RewardConfig):
        sections["reward"] = _scoring(reward, changes)
    if (distillation := getattr(config, "distillation", None)) is not None and distillation.teachers:
        teachers = {
            name: _moved(teacher, {"devices": None, "engine_options": {}}, f"distillation.teachers.{name}", changes)
            for name, teacher in distillation.teachers.items()
        }
        sections["distillation"] = distillation.model_copy(update={"teachers": teachers})
    held_model = getattr(config, "model", None)
    if held_model is not None and getattr(held_model, "liger", False) and not is_installed("liger_kernel"):
        changes.append("model.liger: False instead of True: liger-kernel is not installed; the numbers are the same")
        sections["model"] = held_model.model_copy(update={"liger": False})
    tracking = getattr(config, "tracking", None)
    asked = tracking.trackers if tracking else []
    trackers = [name for name in asked if name not in SERVICES or is_installed(name)]
    if tracking and trackers != asked:
        left_out = ", ".join(name for name in asked if name not in trackers)
        changes.append(
            f"tracking.trackers: without {left_out}, which is not installed; metrics.jsonl is written in any case"
        )
        sections["tracking"] = tracking.model_copy(update={"trackers": trackers})
    return config.model_copy(update=sections), changes


def _scoring(reward: RewardConfig, changes: list[str]) -> RewardConfig:
    """Return the reward with its model and judges on one device; each change is added to ``changes``."""
    model = reward.model and _moved(reward.model, REWARD_MODEL, "reward.model", changes)
    judge = reward.judge and _moved(reward.judge, JUDGE, judge_field(JUDGE_NAME), changes)
    served = reward.served and _moved(reward.served, SERVED, "reward.served", changes)
    more = {name: _moved(each, JUDGE, judge_field(name), changes) for name, each in reward.more_judges.items()}
    return reward.model_copy(update={"model": model, "judge": judge, "more_judges": more, "served": served})


def _moved(model: S, wanted: dict[str, Any], at: str, changes: list[str]) -> S:
    """Return a section with the wanted values; each change is added to ``changes``."""
    different = {key: value for key, value in wanted.items() if getattr(model, key) != value}
    for key, value in different.items():
        changes.append(f"{at}.{key}: {_shown(value)} instead of {_shown(getattr(model, key))}")
    return model.model_copy(update=different)


def _pooled_budget(config: Section, role: str, section: Section) -> dict[str, Any]:
    """Return the token budget of a micro-batch on one device, where several pooled theirs for a sequence: the same tokens."""
    budget = getattr(section, "max_tokens_per_micro_batch", None)
    pooling = getattr(config, "policy", None) if role == "reference" else section
    devices = getattr(pooling, "sequence_parallel", 1)
    return {} if budget is None or devices == 1 else {"max_tokens_per_micro_batch": budget * devices}


def _shown(value: Any) -> str:
    match value:
        case None:
            return "all"
        case dict():
            return ", ".join(f"{key} {one}" for key, one in value.items()) or "none"
        case _:
            return str(value)
