"""Rules about environments: their names and settings, and which go together or have no effect. No environment is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from posttrain.config import RunConfig
from posttrain.config.base import Section
from posttrain.config.checks.settings import setting_problems
from posttrain.config.environment import OPEN, SINGLE_TURN, EnvironmentConfig, TextGameWording
from posttrain.config.roles import holds_a_copy
from posttrain.errors import Problem, did_you_mean
from posttrain.registry import ENVS, TOOL_FORMS
from posttrain.settings import Setting

HERE = ("127.0.0.1", "localhost", "::1")


def environment_problems(config: RunConfig) -> Iterator[Problem]:
    environment = config.environment
    named = {f"environment.named.{key}.name": each.name for key, each in environment.named.items()}
    for field, name in {"environment.name": environment.name, **named}.items():
        yield from _name_problems(name, field)
    if environment.name in ENVS.names():
        yield from setting_problems_of(environment.name or "", environment.settings, "environment.settings")
    for tag, each in environment.named.items():
        if each.name in ENVS.names():
            yield from setting_problems_of(each.name, each.settings, f"environment.named.{tag}.settings")
    if environment.tool_call_form not in ("auto", *TOOL_FORMS.names()):
        yield TOOL_FORMS.problem(environment.tool_call_form, "environment.tool_call_form")
    if OPEN in named.values():
        yield Problem(
            "open is the environment of a whole run", fix="use environment.name=open", field="environment.named"
        )
    if environment.name == OPEN:
        yield from _open_problems(config)
    if environment.extra_episodes and config.asynchronous.is_on:
        what = "environment.extra_episodes is supported in synchronous training only"
        yield Problem(what, fix="use environment.extra_episodes=0", field="environment.extra_episodes")
    known = [name for name in (environment.name, *named.values()) if name is not None and name in ENVS.names()]
    asking = next((name for name in known if ENVS.facts(name).asks), None)
    if asking is not None and environment.workers == 0:
        what = (
            f"{'an agent' if asking == 'agent' else asking} runs in a process of its own, and environment.workers is 0"
        )
        yield Problem(what, fix="use environment.workers=8", field="environment.workers")
    yield from _group_problems(config)
    named_ones = environment.named.values()
    for what, weights in (
        ("train", [each.weight for each in named_ones]),
        (
            "validation",
            [each.weight if each.validation_weight is None else each.validation_weight for each in named_ones],
        ),
    ):
        field = f"environment.{what}_episodes"
        if weights and not any(weights) and getattr(environment, f"{what}_episodes") is not None:
            yield Problem(f"no environment in environment.named has a weight above 0 in {field}", field=field)
    for ours, files in (("train", config.data.train_files), ("validation", config.data.validation_files)):
        field = f"environment.{ours}_episodes"
        if getattr(environment, field.rpartition(".")[2]) is None:
            continue
        if files:
            what = f"{ours} prompts are to come from files and from generated episodes"
            yield Problem(what, fix=f"use one of {field} and data.{ours}_files", field=field)
        if not environment.used:
            yield Problem(f"{field} generates episodes of an environment, and there is none", field=field)
    if environment.used and environment.name != SINGLE_TURN:
        yield from _episode_problems(config)


def _group_problems(config: RunConfig) -> Iterator[Problem]:
    """Report what does not go with an environment that plays all episodes of a group at once, or with turns as responses."""
    environment = config.environment
    if environment.turn_is_response and not environment.sample_per_turn:
        what = "turns count as responses where each is a sample of its own, and environment.sample_per_turn is false"
        yield Problem(what, fix="use environment.sample_per_turn=true", field="environment.turn_is_response")
    if environment.similar_states is not None and not (
        environment.turn_is_response and config.advantage.name == "gigpo"
    ):
        what = "gigpo compares states where turns are responses, and this run has one without the other, or none"
        fix = "use environment.similar_states=null, or advantage.name=gigpo with environment.turn_is_response=true"
        yield Problem(what, fix=fix, field="environment.similar_states")
    for tag, each in environment.named.items():
        if each.name in ENVS.names() and ENVS.facts(each.name).in_groups:
            what = f"{each.name} plays all episodes of a group at once, and is the environment of a whole run"
            yield Problem(what, fix=f"use environment.name={each.name}", field=f"environment.named.{tag}.name")
    name = environment.name
    if name not in ENVS.names() or not ENVS.facts(name or "").in_groups:
        return
    for field, value, wrong, good in (
        ("environment.workers", environment.workers, environment.workers == 0, 8),
        ("asynchronous.mode", config.asynchronous.mode, config.asynchronous.is_on, "off"),
        ("environment.turn_is_response", "false", not environment.turn_is_response, "true"),
    ):
        if wrong:
            what = f"{name} plays all episodes of a group at once, every turn as a response, and {field} is {value}"
            yield Problem(what, fix=f"use {field}={good}", field=field)


def _open_problems(config: RunConfig) -> Iterator[Problem]:
    """Report settings that do not go with episodes that programs outside play."""
    environment = config.environment
    scorer = environment.settings.get("scored_by")
    if isinstance(scorer, str) and scorer not in environment.named:
        known = list(environment.named)
        what = f"conversations are to be scored by {scorer!r}, and environment.named has {', '.join(known) or 'none'}"
        fix = did_you_mean(scorer, known) or f"add environment.named.{scorer}.name"
        yield Problem(what, fix=fix, field="environment.settings.scored_by")
    for tag, each in environment.named.items():
        if each.name == SINGLE_TURN:
            what = f"{SINGLE_TURN} gives no reward, so it scores no conversation of a program outside"
            fix = "leave it out: reward.terms score conversations that end without a reward"
            yield Problem(what, fix=fix, field=f"environment.named.{tag}.name")
    validated = environment.validation_episodes is not None or config.data.validation_files
    if validated and not environment.named:
        what = "programs outside play no validation, and environment.named has no environment that could"
        field = "data.validation_files" if config.data.validation_files else "environment.validation_episodes"
        fix = "add one to environment.named, or leave it out and evaluate checkpoints with posttrain evaluate"
        yield Problem(what, fix=fix, field=field)
    if environment.conversation == "one_message":
        what = "programs outside ask for messages, and environment.conversation is one_message"
        yield Problem(what, fix="use environment.conversation=messages", field="environment.conversation")


def _episode_problems(config: RunConfig) -> Iterator[Problem]:
    """Report settings for single-turn responses that fail or differ in episodes."""
    if config.data.templated_prompts == "raw":
        what = "an environment's conversation is rendered by the chat template, and data.templated_prompts is raw"
        yield Problem(what, fix="take the markers out of the prompts", field="data.templated_prompts")
    turn, longest = config.rollout.max_response_tokens, config.environment.max_context_tokens
    whole = config.environment.max_sequence_tokens
    most = min(
        (each for each in (whole, None if longest is None else longest + turn) if each is not None), default=None
    )
    for role in ("policy", "reference", "critic"):
        budget = getattr(config, role).max_tokens_per_micro_batch
        if budget is None or (most is not None and most <= budget):
            continue
        # A row that is longer than a whole micro-batch would end the run when it comes.
        have = "as many tokens as the model has positions" if most is None else f"{most} tokens"
        room = f"max_context_tokens={max(budget - turn, 1)}" if whole is None else f"max_sequence_tokens={budget}"
        yield Problem(
            f"episodes may have {have}, and a micro-batch of the {role} at most {budget}",
            fix=f"use environment.{room}, or larger micro-batches",
            field=f"{role}.max_tokens_per_micro_batch",
        )
    if most is None and holds_a_copy(config.rollout.engine):
        yield Problem(
            f"{config.rollout.engine} must know how long the conversations of the environments may become",
            fix="give environment.max_context_tokens, such as 4096",
            field="environment.max_context_tokens",
        )
    if config.reward.overlong_buffer_tokens is not None:
        yield Problem(
            "the overlong rule measures one response against rollout.max_response_tokens, which is the limit of a turn here",
            fix="leave reward.overlong_buffer_tokens out",
            field="reward.overlong_buffer_tokens",
        )


def setting_problems_of(name: str, settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    """Settings that a registered environment does not take: every episode would fail by them."""
    described = ENVS.known(name)
    known = dict(described.settings)
    if described.takes_more:
        wording = get_type_hints(TextGameWording)
        known |= {each: Setting(each, kind, None, "") for each, kind in wording.items() if each not in known}
    yield from setting_problems(f"the environment {name}", known, settings, field)


def _name_problems(name: str | None, field: str) -> Iterator[Problem]:
    if name is None:
        return
    path, colon, attribute = name.rpartition(":")
    if colon and not (path and attribute):
        what = f"{name} is no environment: it is written package.module:Class, or path/to/file.py:Class"
        yield Problem(what, field=field)
    elif not colon and name not in ENVS.names():
        yield ENVS.problem(name, field)


def environment_warnings(config: RunConfig) -> Iterator[str]:
    environment = config.environment
    if not environment.used:
        changed = [f"environment.{name}" for name in differing(environment, EnvironmentConfig())]
        if changed:
            has = "have" if len(changed) > 1 else "has"
            yield f"{', '.join(changed)} {has} no effect: environment.name is null"
        if not config.reward.by_turn:
            yield "reward.by_turn has no effect: there is no environment"
        return
    if environment.name == OPEN and (host := environment.settings.get("host", "127.0.0.1")) not in HERE:
        yield (
            f"environment.settings.host={host} can be reached from outside this machine, and what is said is not encrypted"
        )
    if environment.workers == 0 and environment.timeout_s != EnvironmentConfig().timeout_s:
        yield "environment.timeout_s has no effect: environment.workers is 0, and nothing can be stopped in this process"
    if environment.max_turns is None and not environment.end_at_max_turns:
        yield "environment.end_at_max_turns has no effect: environment.max_turns is null"
    longest, whole = environment.max_context_tokens, environment.max_sequence_tokens
    if longest is not None and whole is not None and longest + config.rollout.max_response_tokens <= whole:
        yield "environment.max_sequence_tokens has no effect: environment.max_context_tokens and a turn make up no more"
    if environment.conversation == "one_message":
        for name in ("close_turns", "changed_history"):
            if getattr(environment, name) != EnvironmentConfig.model_fields[name].default:
                yield f"environment.{name} has no effect: environment.conversation is one_message"
    if environment.name == SINGLE_TURN and environment.max_turns not in (None, 1):
        yield f"environment.max_turns has no effect: {SINGLE_TURN} is over after one turn"
    if environment.settings and environment.name is None:
        yield "environment.settings has no effect: environment.name is null"


def differing(section: Section, default: Section) -> list[str]:
    """Names of the fields in which two sections of one kind differ."""
    return [name for name in type(section).model_fields if getattr(section, name) != getattr(default, name)]
