"""Settings of profiles that ask for nothing, or for what a run does not have."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from posttrain.config import SftConfig, TrainingConfig, TuneConfig
from posttrain.config.profiling import ProfilingConfig
from posttrain.config.roles import needs_values, runtime_of, uses_reference

SFT_PHASES = ("update", "validation_loss")


def phases_of(config: TrainingConfig) -> Collection[str]:
    """The phases that steps of this run may have."""
    if isinstance(config, SftConfig):
        phases = set(SFT_PHASES)
        if isinstance(config, TuneConfig) and uses_reference(config):
            phases.add("reference")
        if isinstance(config, TuneConfig) and config.method.needs_kl:
            phases.add("kl")
        return phases
    phases = {"rollout", "reward", "logprobs", "update", "weight_sync"}
    if config.data.validation_files:
        phases.add("validation")
    if "greedy_rewards" in config.advantage.about.inputs:
        phases.add("baseline")
    if needs_values(config):
        phases |= {"values", "critic_update"}
    return phases


def profiling_warnings(config: TrainingConfig) -> Iterator[str]:
    """Report settings that have no effect, in sentences."""
    profiling, default = config.profiling, ProfilingConfig()
    if not profiling.steps:
        for name in type(profiling).model_fields:
            if getattr(profiling, name) != getattr(default, name):
                yield f"profiling.{name} has no effect: profiling.steps is empty"
        return
    if not profiling.operators and not profiling.memory:
        yield "profiling.steps has no effect: profiling.operators and profiling.memory are both false"
    for name in ("shapes", "stacks"):
        if getattr(profiling, name) and not profiling.operators:
            yield f"profiling.{name} has no effect: profiling.operators is false"
    if profiling.memory and config.placement.device == "cpu":
        yield "profiling.memory has no effect: placement.device is cpu, and snapshots are of a CUDA device's memory"
    ranks, devices = profiling.ranks, config.placement.devices
    if runtime_of(config.placement) == "inprocess" and ranks not in ("all", default.ranks):
        yield "profiling.ranks has no effect: this run is one process, which is profiled"
    elif ranks != "all" and (none := [rank for rank in ranks if rank >= devices]):
        yield f"profiling.ranks: the run has {devices} devices, so no worker of rank {', '.join(map(str, none))}"
    lacking = [phase for phase in profiling.phases if phase not in phases_of(config)]
    if lacking:
        yield f"profiling.phases: this run has no phase called {', '.join(lacking)}"
    last = config.run.total_steps
    beyond = [step for step in profiling.steps if step > last] if last is not None and profiling.steps != "all" else []
    if beyond:
        yield f"profiling.steps: the run ends at step {last}, before {', '.join(map(str, beyond))}"
