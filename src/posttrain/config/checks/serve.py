"""Rules between the keys of a ServeConfig. Nothing here looks at a file."""

from __future__ import annotations

from posttrain.config.checks.rollout import missing_sampler, rollout_warnings, sampler_problems
from posttrain.config.rollout import RolloutConfig
from posttrain.config.serve import ServeConfig
from posttrain.errors import Problem
from posttrain.registry import ROLLOUT_ENGINES, is_installed, missing_library

HERE = ("127.0.0.1", "localhost", "::1")


def check(config: ServeConfig) -> list[Problem]:
    """Everything wrong with a configuration whose keys are right one by one."""
    problems, engine = list(sampler_problems(config.rollout)), config.rollout.engine
    if engine not in ROLLOUT_ENGINES.names():
        problems.append(ROLLOUT_ENGINES.problem(engine, "rollout.engine"))
    if not config.endpoint.session_header.strip():
        problems.append(Problem("the session header has no name", field="endpoint.session_header"))
    return problems


def warnings_of(config: ServeConfig) -> list[str]:
    """Report settings that have no effect or are dangerous, in sentences."""
    found = list(rollout_warnings(config.rollout))
    if config.rollout.samples_per_prompt != RolloutConfig().samples_per_prompt:
        found.append("rollout.samples_per_prompt has no effect: each request says how many answers it wants (n)")
    if config.endpoint.host not in HERE:
        found.append(
            f"endpoint.host={config.endpoint.host} can be reached from outside this machine, and what is said is not encrypted"
        )
    if config.model.gradient_checkpointing:
        found.append("model.gradient_checkpointing has no effect: nothing is trained")
    return found


def unsupported(config: ServeConfig) -> list[Problem]:
    """Report valid settings that are planned, or whose library is not installed."""
    problems = missing_sampler(config.rollout)
    if config.placement.devices > 1:
        what = f"an endpoint on {config.placement.devices} devices is planned; this version serves from one"
        problems.append(Problem(what, fix="use placement.devices=1", field="placement.devices"))
    for library in ("starlette", "uvicorn"):
        if not is_installed(library):
            problems.append(missing_library(library, "posttrain serve"))
    return problems
