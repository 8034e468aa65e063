"""Libraries and modules that a training run needs and this Python does not have: a plan can be made without them, not a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from posttrain.config import RunConfig, SftConfig
from posttrain.config.lora import LoraConfig
from posttrain.errors import ConfigError, Problem
from posttrain.registry import TRACKERS, is_installed, missing_library
from posttrain.user_files import module_file


def missing_libraries(config: RunConfig | SftConfig) -> Iterator[Problem]:
    """Report libraries that trackers, teachers and adapters need, and modules of the user's own, that are not installed."""
    for index, name in enumerate(config.tracking.trackers):
        library = TRACKERS.facts(name).library
        if library and not is_installed(library):
            field = f"tracking.trackers.{index}"
            yield replace(missing_library(library, f"the tracker {name}"), field=field)
    served = config.reward.served if isinstance(config, RunConfig) else None
    if served is not None and "python" not in served.engine_options and not is_installed(served.engine):
        what = f"{served.engine} is not installed in this Python"
        fix = f"name one that has it (reward.served.engine_options.python); or pip install 'posttrain[{served.engine}]'"
        yield Problem(what, fix=fix, field="reward.served.engine", library=served.engine)
    for name, teacher in config.distillation.teachers.items():
        if teacher.queued and not is_installed("zmq"):
            field = f"distillation.teachers.{name}.endpoints"
            yield replace(missing_library("zmq", "a teacher at a tcp:// address"), field=field)
    for index, module in enumerate(config.model.external_modules):
        try:
            module_file(module, asked=module)
        except ConfigError as error:
            yield from (replace(problem, field=f"model.external_modules.{index}") for problem in error.problems)
    if _adapters(config) and not is_installed("peft"):
        yield replace(missing_library("peft", "policy.lora"), field="policy.lora")
    if any(each.quantize for each in _adapters(config)) and not is_installed("bitsandbytes"):
        yield replace(missing_library("bitsandbytes", "policy.lora.quantize"), field="policy.lora.quantize")


def _adapters(config: RunConfig | SftConfig) -> list[LoraConfig]:
    adapters: list[LoraConfig | None] = [config.policy.lora]
    if isinstance(config, RunConfig):
        adapters.append(config.critic.lora)
    return [adapter for adapter in adapters if adapter is not None]
