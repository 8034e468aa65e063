"""Making environments from specs, and checking and converting the values that they return."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from posttrain.backends.environments import checked
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
            raise checked.BadAnswer(
                "it asks for turns by itself, for which it needs a process (environment.workers above 0)"
            )
        return {**_plain(self._done(self._env.reset(self._seed)), EnvStart, self._env), "saved": self._state()}

    def restore(self, saved: Any, emit: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Continue a saved episode, in place of ``reset`` or ``begin``. ``emit``: takes the events of an AskingEnv."""
        if not self._can_be_saved:
            raise checked.BadAnswer("it was saved and has no restore and state any more")
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
                raise checked.BadAnswer(f"close returned {_named(metrics)} instead of a mapping of metrics")
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
            raise checked.BadAnswer(f"state returned what is no JSON value: {error}") from None

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
    if isinstance(error, checked.BadAnswer):
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
        raise checked.BadAnswer(
            f"{method} returned {_named(value)} instead of an {kind.__name__} ({defined_at(type(env))})"
        )
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
        values = checked.mapping(json_text.whole_characters(plain))
        if values.get("restored") is True:
            return EnvRestored()
        return EnvStart(
            messages=checked.messages(values, "messages", EnvStart),
            tools=checked.messages(values, "tools", EnvStart, role=False),
            state_key=checked.text(values, "state_key"),
            max_response_tokens=checked.count(values, "max_response_tokens"),
            saved=values.get("saved"),
        )
    except checked.BadAnswer as error:
        return EnvFailed(INVALID, f"reset: {error}")


def step_of(plain: Any) -> EnvStep | EnvFailed:
    """Check and convert the value of ``HostedEpisode.step``."""
    try:
        values = checked.mapping(json_text.whole_characters(plain))
        done, stop = values.get("done"), values.get("stop")
        if not isinstance(done, bool):
            raise checked.BadAnswer(f"done is {checked.shown(done)} instead of True or False")
        if not isinstance(stop, str):
            raise checked.BadAnswer(f"stop is {checked.shown(stop)} instead of a text")
        edited = values.get("conversation")
        return EnvStep(
            messages=checked.messages(values, "messages", EnvStep),
            reward=None if values.get("reward") is None else checked.number(values["reward"], "reward"),
            penalty=checked.number(values.get("penalty", 0.0), "penalty"),
            done=done,
            stop=stop,
            metrics=checked.metrics_of(values.get("metrics")),
            action=checked.text(values, "action"),
            state_key=checked.text(values, "state_key"),
            conversation=None if edited is None else checked.messages(values, "conversation", EnvStep),
            tools=None if values.get("tools") is None else checked.messages(values, "tools", EnvStep, role=False),
            max_response_tokens=checked.count(values, "max_response_tokens"),
            saved=values.get("saved"),
            keeps=checked.count(values, "keeps"),
            learned=checked.marks(values.get("learned")),
        )
    except checked.BadAnswer as error:
        return EnvFailed(INVALID, f"step: {error}")


def scored_of(plain: Any) -> EnvScored | EnvFailed:
    """Check and convert the value of ``HostedEpisode.score``."""
    try:
        values = checked.mapping(json_text.whole_characters(plain))
        reward = values.get("reward")
        return EnvScored(
            reward=None if reward is None else checked.number(reward, "reward"),
            stop=checked.text(values, "stop") or "",
            metrics=checked.metrics_of(values.get("metrics")),
        )
    except checked.BadAnswer as error:
        return EnvFailed(INVALID, f"score: {error}")


def event_of(plain: Any) -> EnvAsk | EnvWithdrawn | EnvStep | EnvFailed:
    """Check and convert an event of an AskingEnv."""
    try:
        values = checked.mapping(json_text.whole_characters(plain))
        if "end" in values:
            return step_of(values["end"])
        if "failed" in values:
            reason, detail = values["failed"]
            return EnvFailed(str(reason), str(detail))
        if "withdrawn" in values:
            return EnvWithdrawn(str(values["withdrawn"]))
        ask = checked.mapping(values.get("ask"))
        if not isinstance(line := ask.get("line"), int):
            raise checked.BadAnswer(f"line is {checked.shown(line)} instead of a number")
        return EnvAsk(
            turn=str(ask.get("turn")),
            line=line,
            messages=checked.messages(ask, "messages", EnvAsk),
            tools=checked.messages(ask, "tools", EnvAsk, role=False),
            max_response_tokens=checked.count(ask, "max_response_tokens"),
            trained=ask.get("trained") is not False,
            prompt=checked.raw_prompt(ask.get("prompt")),
            keeps=checked.count(ask, "keeps"),
            options=checked.options(ask.get("options") or {}),
            saved=ask.get("saved"),
        )
    except checked.BadAnswer as error:
        return EnvFailed(INVALID, f"a request for a turn: {error}")


def closed_of(plain: Any) -> Mapping[str, float] | EnvFailed:
    """Check and convert the value of ``HostedEpisode.close``."""
    try:
        return checked.metrics_of(checked.mapping(json_text.whole_characters(plain)).get("metrics"))
    except checked.BadAnswer as error:
        return EnvFailed(INVALID, f"close: {error}")
