"""Making environments from specs, and checking and converting the values that they return."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from posttrain.backends.environments.scoring import OtherConversation, Scorer
from posttrain.errors import RequestError
from posttrain.interfaces.env import (
    AskingEnv,
    Env,
    EnvAsk,
    EnvBuilder,
    EnvFailed,
    EnvRestored,
    EnvScored,
    EnvSpec,
    EnvStart,
    EnvStep,
    EnvWithdrawn,
    FinishedConversation,
    PlayedTurn,
    ScoringEnv,
    TurnOptions,
)
from posttrain.libraries import json_text
from posttrain.libraries.own_code import load
from posttrain.records.trajectories import SamplingParams
from posttrain.registry import ENVS
from posttrain.user_files import defined_at, own_line

CRASHED = "env_crashed"  # reasons of EnvFailed: it raised, or its process ended
TIMEOUT = "env_timeout"
MEMORY = "env_memory"  # it needed more than environment.memory_gib
INVALID = "env_invalid"  # it returned something else than it should
OTHER = "env_other_conversation"  # played again for its score, it says something else than stands in the conversation
T = TypeVar("T")


class BadAnswer(Exception):
    """An environment returned something else than it should; the message names it."""


class HostedEpisode:
    """One environment in the process that steps it."""

    def __init__(self, spec: EnvSpec, seed: int):
        self._loop = asyncio.Runner()
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        self._env: Any = make(spec)  # an Env or an AskingEnv
        self._seed = seed
        self._saves = spec.saves
        self._scorer = Scorer(self._env, seed, self._done)

    @property
    def asks(self) -> bool:
        """True for an AskingEnv."""
        return hasattr(self._env, "begin") and hasattr(self._env, "answer")

    def begin(self, emit: Callable[[dict[str, Any]], None]) -> None:
        """Begin the episode of an AskingEnv, whose events ``emit`` gets as plain values."""
        self._env.begin(self._seed, self._emitter(emit))

    def _emitter(self, emit: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
        def emitted(event: EnvAsk | EnvWithdrawn | EnvStep | Exception) -> None:
            try:
                if isinstance(event, EnvAsk) and (state := self._state()) is not None:
                    event = replace(event, saved={"turn": event.turn, "env": state})
            except Exception as error:  # noqa: BLE001 - of someone's state()
                event = error
            emit(_plain_event(event))

        return emitted

    def answer(self, turn: str, action: str, tokens: Sequence[Any] = (), **more: Any) -> None:
        if tokens:
            self._env.sampled(turn, *tokens)
        self._env.answer(turn, action, **more)

    def reset(self) -> dict[str, Any]:
        if self.asks:
            raise BadAnswer("it asks for turns by itself, for which it needs a process (environment.workers above 0)")
        return {**_plain(self._done(self._env.reset(self._seed)), EnvStart, self._env), "saved": self._state()}

    def restore(self, saved: Any, emit: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Continue a saved episode, in place of ``reset`` or ``begin``. ``emit``: takes the events of an AskingEnv."""
        if not self._can_be_saved:
            raise BadAnswer("it was saved and has no restore and state any more")
        if self.asks:
            assert emit is not None
            self._env.restore(saved["env"], self._emitter(emit))
            return {"restored": True, "waits_for": saved["turn"]}
        self._done(self._env.restore(saved))
        return {"restored": True}

    def step(self, action: str, cut: bool = False) -> dict[str, Any]:
        if cut and callable(tell := getattr(self._env, "turn_was_cut", None)):
            tell()
        return {**_plain(self._done(self._env.step(action)), EnvStep, self._env), "saved": self._state()}

    def score(self, conversation: FinishedConversation) -> dict[str, Any]:
        """Score a conversation of a program outside, in place of ``reset`` and ``step``."""
        return self._scorer.score(conversation)

    def task(self) -> dict[str, Any]:
        """Begin an episode that a program outside plays."""
        return {**_plain(self._scorer.task(), EnvStart, self._env), "saved": None}

    def close(self) -> dict[str, Any]:
        try:
            if not hasattr(self._env, "close") and hasattr(self._env, "score"):
                return {"metrics": {}}
            metrics = self._done(self._env.close())
            if not isinstance(metrics, Mapping):
                raise BadAnswer(f"close returned {_named(metrics)} instead of a mapping of metrics")
            return {"metrics": dict(metrics)}
        finally:
            self._loop.close()

    @property
    def _can_be_saved(self) -> bool:
        return all(callable(getattr(self._env, name, None)) for name in ("state", "restore"))

    def _state(self) -> Any:
        """The environment's state, where it is wanted and can be had."""
        if not (self._saves and self._can_be_saved):
            return None
        state = self._env.state()
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise BadAnswer(f"state returned what is no JSON value: {error}") from None

    def _done(self, value: T | Awaitable[T]) -> T:
        return self._loop.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[T]) -> T:
    return await value


def make(spec: EnvSpec) -> Env | AskingEnv | ScoringEnv:
    """Raises: ConfigError when there is no such environment; whatever the builder raises."""
    return builder_of(spec.name)(spec, **spec.settings)


def builder_of(name: str) -> EnvBuilder:
    """Raises: UnknownName, MissingDependency, ConfigError."""
    if ":" not in name:
        builder: EnvBuilder = ENVS.get(name)
        return builder
    own: EnvBuilder = load(name)
    return own


def loading_failures(names: Sequence[str]) -> dict[str, str]:
    """Import environments and the user's own code. Returns: the errors of those that cannot be imported, by name."""
    failures = {}
    for name in names:
        try:
            load(name) if ":" in name else ENVS.get(name)
        except BaseException as error:  # noqa: BLE001 - someone's file, which may also call sys.exit
            failures[name] = failure_of(error)[1]
    return failures


def failure_of(error: BaseException) -> tuple[str, str]:
    """Reason and detail of an episode whose environment has raised."""
    if isinstance(error, BadAnswer):
        return INVALID, str(error)
    if isinstance(error, OtherConversation):
        return OTHER, str(error)
    if isinstance(error, RequestError):
        return CRASHED, "; ".join(problem.what for problem in error.problems)
    place = own_line(error)
    reason = MEMORY if isinstance(error, MemoryError) else CRASHED
    return reason, f"{type(error).__name__}: {error}{f' ({place})' if place else ''}"[:1000]


def _plain(value: Any, kind: type[EnvStart] | type[EnvStep], env: Any = None) -> dict[str, Any]:
    if not isinstance(value, kind):
        method = "reset" if kind is EnvStart else "step"
        raise BadAnswer(f"{method} returned {_named(value)} instead of an {kind.__name__} ({defined_at(type(env))})")
    return {item.name: getattr(value, item.name) for item in fields(kind)}


def _plain_event(event: EnvAsk | EnvWithdrawn | EnvStep | Exception) -> dict[str, Any]:
    """{"ask": …}, {"withdrawn": …}, {"end": …} or {"failed": [reason, detail]}."""
    if isinstance(event, EnvAsk):
        plain = {item.name: getattr(event, item.name) for item in fields(event)}
        return {"ask": {**plain, "options": asdict(event.options)}}
    if isinstance(event, EnvWithdrawn):
        return {"withdrawn": event.turn}
    if isinstance(event, EnvStep):
        return {"end": _plain(event, EnvStep)}
    return {"failed": list(failure_of(event))}


def _named(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def spec_of(plain: Mapping[str, Any]) -> EnvSpec:
    sampling = plain["sampling"]
    if sampling is not None:
        as_tuples = {name: tuple(sampling[name]) for name in ("stop", "stop_token_ids")}
        sampling = SamplingParams(**{**sampling, **as_tuples})
    return EnvSpec(**{**plain, "sampling": sampling, "honours": tuple(plain["honours"])})


def finished_of(plain: Mapping[str, Any]) -> FinishedConversation:
    return FinishedConversation(**{**plain, "turns": [PlayedTurn(**turn) for turn in plain["turns"]]})


def start_of(plain: Any) -> EnvStart | EnvRestored | EnvFailed:
    """Check and convert the value of ``HostedEpisode.reset`` or ``restore``: the environment is not the trainer's code."""
    try:
        values = _mapping(json_text.whole_characters(plain))
        if values.get("restored") is True:
            return EnvRestored()
        return EnvStart(
            messages=_messages(values, "messages", EnvStart),
            tools=_messages(values, "tools", EnvStart, role=False),
            state_key=_text(values, "state_key"),
            max_response_tokens=_count(values, "max_response_tokens"),
            saved=values.get("saved"),
        )
    except BadAnswer as error:
        return EnvFailed(INVALID, f"reset: {error}")


def step_of(plain: Any) -> EnvStep | EnvFailed:
    """Check and convert the value of ``HostedEpisode.step``."""
    try:
        values = _mapping(json_text.whole_characters(plain))
        done, stop = values.get("done"), values.get("stop")
        if not isinstance(done, bool):
            raise BadAnswer(f"done is {_shown(done)} instead of True or False")
        if not isinstance(stop, str):
            raise BadAnswer(f"stop is {_shown(stop)} instead of a text")
        edited = values.get("conversation")
        return EnvStep(
            messages=_messages(values, "messages", EnvStep),
            reward=None if values.get("reward") is None else _number(values["reward"], "reward"),
            penalty=_number(values.get("penalty", 0.0), "penalty"),
            done=done,
            stop=stop,
            metrics=metrics_of(values.get("metrics")),
            action=_text(values, "action"),
            state_key=_text(values, "state_key"),
            conversation=None if edited is None else _messages(values, "conversation", EnvStep),
            tools=None if values.get("tools") is None else _messages(values, "tools", EnvStep, role=False),
            max_response_tokens=_count(values, "max_response_tokens"),
            saved=values.get("saved"),
            keeps=_count(values, "keeps"),
        )
    except BadAnswer as error:
        return EnvFailed(INVALID, f"step: {error}")


def scored_of(plain: Any) -> EnvScored | EnvFailed:
    """Check and convert the value of ``HostedEpisode.score``."""
    try:
        values = _mapping(json_text.whole_characters(plain))
        reward = values.get("reward")
        return EnvScored(
            reward=None if reward is None else _number(reward, "reward"),
            stop=_text(values, "stop") or "",
            metrics=metrics_of(values.get("metrics")),
        )
    except BadAnswer as error:
        return EnvFailed(INVALID, f"score: {error}")


def event_of(plain: Any) -> EnvAsk | EnvWithdrawn | EnvStep | EnvFailed:
    """Check and convert an event of an AskingEnv."""
    try:
        values = _mapping(json_text.whole_characters(plain))
        if "end" in values:
            return step_of(values["end"])
        if "failed" in values:
            reason, detail = values["failed"]
            return EnvFailed(str(reason), str(detail))
        if "withdrawn" in values:
            return EnvWithdrawn(str(values["withdrawn"]))
        ask = _mapping(values.get("ask"))
        if not isinstance(line := ask.get("line"), int):
            raise BadAnswer(f"line is {_shown(line)} instead of a number")
        return EnvAsk(
            turn=str(ask.get("turn")),
            line=line,
            messages=_messages(ask, "messages", EnvAsk),
            tools=_messages(ask, "tools", EnvAsk, role=False),
            max_response_tokens=_count(ask, "max_response_tokens"),
            trained=ask.get("trained") is not False,
            prompt=_raw_prompt(ask.get("prompt")),
            keeps=_count(ask, "keeps"),
            options=_options(ask.get("options") or {}),
            saved=ask.get("saved"),
        )
    except BadAnswer as error:
        return EnvFailed(INVALID, f"a request for a turn: {error}")


def _raw_prompt(value: Any) -> str | tuple[int, ...] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)) or not all(type(token) is int for token in value):
        raise BadAnswer(f"prompt is {_shown(value)} instead of a text or token ids")
    return tuple(value)


def _options(value: Any) -> TurnOptions:
    values = _mapping(value)
    stop, seed = values.get("stop") or (), values.get("seed")
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
        raise BadAnswer(f"stop is {_shown(stop)} instead of texts")
    if seed is not None and type(seed) is not int:
        raise BadAnswer(f"seed is {_shown(seed)} instead of a number")
    temperature = None if values.get("temperature") is None else _number(values["temperature"], "temperature")
    if temperature is not None and temperature <= 0:
        raise BadAnswer(f"temperature is {temperature:g} instead of a number above 0")
    return TurnOptions(
        stop=tuple(stop),
        seed=seed,
        draws_as=str(values.get("draws_as") or ""),
        top_logprobs=(_count(values, "top_logprobs") or 0) if values.get("top_logprobs") else 0,
        prompt_logprobs=values.get("prompt_logprobs") is True,
        temperature=temperature,
        grammar=str(values.get("grammar") or ""),
        tokens=values.get("tokens") is True,
    )


def closed_of(plain: Any) -> Mapping[str, float] | EnvFailed:
    """Check and convert the value of ``HostedEpisode.close``."""
    try:
        return metrics_of(_mapping(json_text.whole_characters(plain)).get("metrics"))
    except BadAnswer as error:
        return EnvFailed(INVALID, f"close: {error}")


def metrics_of(values: Any) -> dict[str, float]:
    """Raises: BadAnswer."""
    return {str(name): _number(value, f"metric {name}") for name, value in _mapping(values).items()}


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise BadAnswer(f"{_shown(value)} is no mapping")
    return value


def _messages(values: Mapping[Any, Any], name: str, kind: type, *, role: bool = True) -> list[Mapping[str, Any]]:
    found = values.get(name)
    if not isinstance(found, (list, tuple)):
        raise BadAnswer(f"{name} is {_shown(found)} instead of a list")
    for item in found:
        if not isinstance(item, Mapping) or (role and not isinstance(item.get("role"), str)):
            raise BadAnswer(f"{name} holds {_shown(item)}, which is no message with a role")
    return [dict(item) for item in found]


def _number(value: Any, name: str) -> float:
    # A number of numpy's or torch's.
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        value = value.item()
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadAnswer(f"{name} is {_shown(value)} instead of a finite number")
    return float(value)


def _text(values: Mapping[Any, Any], name: str) -> str | None:
    if (found := values.get(name)) is not None and not isinstance(found, str):
        raise BadAnswer(f"{name} is {_shown(found)} instead of a text")
    return found


def _count(values: Mapping[Any, Any], name: str) -> int | None:
    if (found := values.get(name)) is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 1):
        raise BadAnswer(f"{name} is {_shown(found)} instead of a number of tokens")
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
