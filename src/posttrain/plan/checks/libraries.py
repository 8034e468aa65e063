"""Optional libraries that a training run needs and this Python does not have: a plan can be made without them, and not a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from posttrain.config import RunConfig, SftConfig
from posttrain.config.lora import LoraConfig
from posttrain.errors import Problem
from posttrain.registry import is_installed, missing_library, optional_libraries


def missing_libraries(config: RunConfig | SftConfig) -> Iterator[Problem]:
    """Report each library that a tracker or an adapter needs and that is not installed."""
    optional = optional_libraries()
    for index, name in enumerate(config.tracking.trackers):
        if name in optional and not is_installed(name):
            field = f"tracking.trackers.{index}"
            yield replace(missing_library(name, f"the tracker {name}"), field=field)
    if _trains_an_adapter(config) and not is_installed("peft"):
        yield replace(missing_library("peft", "policy.lora"), field="policy.lora")


def _trains_an_adapter(config: RunConfig | SftConfig) -> bool:
    adapters: list[LoraConfig | None] = [config.policy.lora]
    if isinstance(config, RunConfig):
        adapters.append(config.critic.lora)
    return any(adapter is not None for adapter in adapters)
