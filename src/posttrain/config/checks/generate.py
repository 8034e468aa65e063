"""Rules between the keys of a GenerateConfig. Nothing here looks at a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from posttrain.config.checks.rollout import missing_sampler, rollout_warnings, sampler_problems
from posttrain.config.generate import GenerateConfig
from posttrain.config.roles import shares_weights
from posttrain.errors import Problem
from posttrain.registry import ROLLOUT_ENGINES, is_installed, missing_library

# Of files that are read by this suffix as something else than parquet, which verl writes under any name
_OTHER_KINDS = (".json", ".jsonl", ".csv", ".arrow")


def check(config: GenerateConfig) -> list[Problem]:
    """Everything wrong with a configuration whose keys are right one by one."""
    engine, output = config.rollout.engine, config.output
    # No weights are sent
    problems = [each for each in sampler_problems(config.rollout) if each.field != "rollout.weight_folder"]
    if engine not in ROLLOUT_ENGINES.names():
        problems.append(ROLLOUT_ENGINES.problem(engine, "rollout.engine"))
    if not config.data.files:
        problems.append(
            Problem("there is no file with prompts", fix="write data.files: [FILE, ...]", field="data.files")
        )
    if config.rollout.temperature == 0 and config.rollout.samples_per_prompt > 1:
        samples = config.rollout.samples_per_prompt
        what = f"at temperature 0 the {samples} responses to a prompt would all be the same"
        fix = "use rollout.samples_per_prompt=1, or a temperature above 0"
        problems.append(Problem(what, fix=fix, field="rollout.samples_per_prompt"))
    if Path(output.file).suffix.lower() in _OTHER_KINDS:
        what = f"the output file {output.file} is a parquet file, and its name must end in .parquet"
        problems.append(Problem(what, fix=f"use {Path(output.file).with_suffix('.parquet')}", field="output.file"))
    if "://" in output.file:
        what = f"{output.file} is not on this machine"
        problems.append(Problem(what, fix="name a local file, and upload it afterwards", field="output.file"))
    size, devices = config.rollout.tensor_parallel, config.placement.devices
    if engine != "native" and not config.rollout.endpoints and devices % size and devices > 1:
        what = f"{devices} devices do not divide into copies of the sampler on {size} each"
        problems.append(Problem(what, fix=f"use {size} devices, or a multiple", field="placement.devices"))
    if config.placement.nodes > 1 and not config.rollout.endpoints:
        problems += _problems_of_machines(config)
    if not output.column.strip():
        problems.append(Problem("the column of the responses has no name", field="output.column"))
    inputs = {Path(file).expanduser().absolute() for file in config.data.files}
    if output.file and Path(output.file).expanduser().absolute() in inputs:
        what = f"{output.file} is read and written"
        problems.append(Problem(what, fix="name another output.file", field="output.file"))
    return problems


def _problems_of_machines(config: GenerateConfig) -> list[Problem]:
    """Return what is wrong with a generation on several machines."""
    rollout, nodes, devices = config.rollout, config.placement.nodes, config.placement.devices
    per_node, size = devices // nodes, rollout.tensor_parallel
    if devices % nodes or not per_node:
        what = f"{devices} devices do not spread evenly over {nodes} machines"
        return [Problem(what, fix=f"use placement.devices={max(1, per_node) * nodes}", field="placement.devices")]
    if rollout.engine not in ROLLOUT_ENGINES.names() or shares_weights(rollout.engine):
        return []
    facts = ROLLOUT_ENGINES.facts(rollout.engine)
    if rollout.engine == "http" or (size > per_node and not facts.spans_nodes):
        able = ", ".join(name for name in ROLLOUT_ENGINES.names() if name != "http")
        what = f"{rollout.engine} has no copies on several machines"
        return [Problem(what, fix=f"use rollout.engine={able}", field="rollout.engine")]
    if max(size, per_node) % min(size, per_node):
        what = f"{per_node} devices of a machine and {size} of a copy of the sampler do not fit together"
        fix = f"use rollout.tensor_parallel={per_node}, or a divisor or a multiple of it"
        return [Problem(what, fix=fix, field="rollout.tensor_parallel")]
    return []


def warnings_of(config: GenerateConfig) -> list[str]:
    """Report settings that have no effect, in sentences."""
    rollout, found = config.rollout, list(rollout_warnings(config.rollout))
    if rollout.engine == "native":
        found += [
            f"rollout.{name} has no effect: the native engine has no such settings"
            for name in ("engine_options", "engine_sampling")
            if getattr(rollout, name)
        ]
        if rollout.tensor_parallel > 1:
            found.append("rollout.tensor_parallel has no effect: the native engine runs on one device")
    if rollout.temperature == 0:
        found += [
            f"rollout.{name} has no effect: at temperature 0 the most likely token is taken"
            for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
            if getattr(rollout, name) != off
        ]
    if config.model.gradient_checkpointing:
        found.append("model.gradient_checkpointing has no effect: nothing is trained")
    return found


def unsupported(config: GenerateConfig) -> list[Problem]:
    """Report valid settings that are planned but not built yet."""
    problems = missing_sampler(config.rollout)
    if config.placement.nodes > 1 and not config.rollout.endpoints and not is_installed("ray"):
        by = f"placement.nodes={config.placement.nodes}"
        problems.append(replace(missing_library("ray", by), field="placement.nodes"))
    return problems
