"""Changes of the configuration between the start of a run and its resuming: those that are harmless, and those that would make
it another run."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.algorithm import AlgorithmSection

# Where things are, how long the run is, what is shown, what is saved, how the work is cut: the numbers of a step do not
# depend on these beyond rounding. Whole sections end in a dot.
HARMLESS = (
    "checkpoint.",
    "placement.",
    "profiling.",
    "tracking.",
    "validation.",
    "run.folder",
    "run.grace_s",
    "run.max_skipped_steps",
    "run.name",
    "run.resume",
    "run.resume_path",
    "run.total_epochs",
    "run.total_steps",
    "run.within_epochs",
    "critic.activation_offload",
    "critic.devices",
    "critic.gradient_checkpointing",
    "critic.max_tokens_per_micro_batch",
    "critic.optimizer.offload",
    "critic.pipeline_parallel",
    "critic.sequence_parallel",
    "critic.sequences_per_micro_batch_per_device",
    "critic.tensor_parallel",
    "data.filter_workers",
    "data.tokenize_workers",
    "data.validation_files",
    "environment.timeout_s",
    "environment.validation_episodes",
    "environment.workers",
    "model.activation_offload",
    "model.compile",
    "model.gradient_checkpointing",
    "model.liger",
    "model.padded",
    "policy.devices",
    "policy.max_tokens_per_micro_batch",
    "policy.optimizer.offload",
    "policy.pipeline_parallel",
    "policy.sequence_parallel",
    "policy.sequences_per_micro_batch_per_device",
    "policy.share_prompts",
    "policy.tensor_parallel",
    "reference.devices",
    "reference.max_tokens_per_micro_batch",
    "reference.offload",
    "reference.sequences_per_micro_batch_per_device",
    "reward.judge.devices",
    "reward.judge.max_concurrent_sequences",
    "reward.max_invalid_share",
    "reward.model.devices",
    "reward.model.sequences_per_micro_batch_per_device",
    "reward.served.devices",
    "reward.served.max_concurrent_sequences",
    "reward.served.tensor_parallel",
    "rollout.devices",
    "rollout.max_concurrent_sequences",
    "rollout.max_prefill_tokens",
    "rollout.tensor_parallel",
)
_OF_A_JUDGE = re.compile(r"^reward\.more_judges\.[^.]+\.")


@dataclass(frozen=True, slots=True)
class Change:
    field: str
    before: Any
    now: Any

    @property
    def harmless(self) -> bool:
        field = _OF_A_JUDGE.sub("reward.judge.", self.field)
        return field in HARMLESS or field.startswith(tuple(name for name in HARMLESS if name.endswith(".")))

    def __str__(self) -> str:
        return f"{self.field} {self.before} -> {self.now}"


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], root: type[TrainingConfig] = RunConfig) -> list[Change]:
    """Differences between the configuration that a run has saved and this one, both as read from YAML. A setting that the
    saved one does not know, because an earlier version wrote it, counts as its default. Both are of kind ``root``."""
    defaults = flat(root.model_validate({"model": {"path": ""}, "data": {"train_files": []}}).model_dump(mode="json"))
    defaults |= {f"{section}.{key}": default for section, key, default in _settings(root)}
    before, after = defaults | flat(saved), defaults | flat(now)
    for key, value in before.items():
        if isinstance(value, list) and value and value != after.get(key):
            before[key] = _with_defaults(key, value, now, root)
    added, removed = _sections_only_in(after, before), _sections_only_in(before, after)
    whole = [Change(name, None, _listed(after, name)) for name in added]
    whole += [Change(name, _listed(before, name), None) for name in removed]
    return whole + [
        Change(key, before.get(key), after.get(key))
        for key in after | before
        if before.get(key) != after.get(key)
        and not any(key == name or key.startswith(f"{name}.") for name in added | removed)
    ]


def _sections_only_in(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, None]:
    """The optional sections (``policy.lora``) that ``one`` has and ``other`` sets to null: each is one change."""
    inside, outside = (dict.fromkeys(key.rpartition(".")[0] for key in each) for each in (one, other))
    return {name: None for name in inside if name not in outside and name in other and other[name] is None}


def _listed(values: Mapping[str, Any], section: str) -> str:
    """The settings of a section in one line: ``rank=8, alpha=16.0``"""
    inside = {key.removeprefix(f"{section}."): value for key, value in values.items() if key.startswith(f"{section}.")}
    return ", ".join(f"{key}={value}" for key, value in inside.items())


def _with_defaults(key: str, value: list[Any], now: Mapping[str, Any], root: type[TrainingConfig]) -> Any:
    """A saved list, such as the terms of the reward, whose entries have the settings that an earlier version did not know."""
    tree = copy.deepcopy(dict(now))
    *sections, name = key.split(".")
    section = tree
    try:
        for part in sections:
            section = section[part]
        section[name] = value
        return flat(root.model_validate(tree).model_dump(mode="json"))[key]
    except (ValidationError, KeyError, TypeError):  # it does not fit into this configuration: it differs as it is
        return value


def _settings(root: type[TrainingConfig]) -> Iterator[tuple[str, str, Any]]:
    """Section, name and default of every setting of an algorithm: a configuration holds those of the chosen one alone."""
    for section, field in root.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, AlgorithmSection):
            for key, setting in field.annotation.registry.all_settings().items():
                yield section, key, None if setting.required else setting.default


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value; lists stay whole."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
