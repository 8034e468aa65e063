"""Rules between the keys of a ServeConfig. Nothing here looks at a file."""

from __future__ import annotations

from posttrain.config.base import Section
from posttrain.config.checks.rollout import missing_sampler, rollout_warnings, sampler_problems
from posttrain.config.rollout import RolloutConfig
from posttrain.config.serve import ServeConfig
from posttrain.errors import Problem
from posttrain.registry import ROLLOUT_ENGINES, TOOL_FORMS, is_installed, missing_library

HERE = ("127.0.0.1", "localhost", "::1")


def check(config: ServeConfig) -> list[Problem]:
    """Everything wrong with a configuration whose keys are right one by one."""
    problems, engine = list(sampler_problems(config.rollout)), config.rollout.engine
    if engine not in ROLLOUT_ENGINES.names():
        problems.append(ROLLOUT_ENGINES.problem(engine, "rollout.engine"))
    elif config.endpoint.beside is not None and not ROLLOUT_ENGINES.facts(engine).shares_weights:
        what = f"rollout.engine={engine} serves one model, and endpoint.beside names a second"
        problems.append(Problem(what, fix="use native, or leave endpoint.beside out", field="endpoint.beside"))
    if config.data.tool_call_form not in ("auto", *TOOL_FORMS.names()):
        problems.append(TOOL_FORMS.problem(config.data.tool_call_form, "data.tool_call_form"))
    if not config.endpoint.session_header.strip():
        problems.append(Problem("the session header has no name", field="endpoint.session_header"))
    if config.endpoint.api == "tinker" and engine != "native":
        what = f"rollout.engine={engine} cannot sample from adapters in training"
        problems.append(Problem(what, fix="use native, which reads the trainer's weights", field="rollout.engine"))
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
    if config.endpoint.api == "tinker":
        found += _without_effect_for_tinker(config)
    elif config.model.gradient_checkpointing:
        found.append("model.gradient_checkpointing has no effect: nothing is trained")
    return found


def _without_effect_for_tinker(config: ServeConfig) -> list[str]:
    """Report settings of the other interface: a request of Tinker's has its own sampling, and its tokens are the client's."""
    sections: list[tuple[str, Section, tuple[str, ...]]] = [
        ("endpoint", config.endpoint, ("beside", "record", "any_sampling", "session_header", "max_sessions")),
        ("data", config.data, ("max_prompt_tokens", "chat_template_options")),
        ("rollout", config.rollout, ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos")),
    ]
    found = [
        f"{section}.{name}"
        for section, values, names in sections
        for name in names
        if getattr(values, name) != type(values).model_fields[name].get_default(call_default_factory=True)
    ]
    return (
        [f"{', '.join(found)}: no effect with endpoint.api=tinker, whose requests say it themselves"] if found else []
    )


def unsupported(config: ServeConfig) -> list[Problem]:
    """Report valid settings that are planned, or whose library is not installed."""
    problems = missing_sampler(config.rollout)
    if config.placement.devices > 1:
        what = f"an endpoint on {config.placement.devices} devices is planned; this version serves from one"
        problems.append(Problem(what, fix="use placement.devices=1", field="placement.devices"))
    tinker = config.endpoint.api == "tinker"
    for library in ("starlette", "uvicorn", *(("peft", "google.protobuf") if tinker else ())):
        if not is_installed(library):
            problems.append(missing_library(library, "posttrain serve --api tinker" if tinker else "posttrain serve"))
    return problems
