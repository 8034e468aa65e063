"""An environment: the model acts, a world answers, until the episode is over.

An environment is used for one episode and lives in the process that steps it, mostly not the trainer's: what crosses the
border is an ``EnvSpec`` on the way in and what ``reset``, ``step`` and ``close`` return on the way out, all of it plain values
(numbers, texts, lists, mappings with texts as keys). A task of one turn is the case that is done after the first step.

It speaks in messages. Token ids are not its business: ``steps.play`` keeps what was sampled, as it was sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[
    str, Any
]  # of a chat: role and content, and what else the chat template reads (name, tool_call_id, …)
Tool = Mapping[str, Any]  # a function as the chat template wants it: {"type": "function", "function": {"name": …}}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How to make an environment, in plain values."""

    name: str  # in ENVS, or "package.module:Class", or "path/to/file.py:Class"
    settings: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the environment's own; keyword arguments of its builder
    messages: Sequence[Message] = ()  # the row's conversation; empty where the environment begins it
    row: Mapping[str, Any] = field(
        default_factory=dict
    )  # the row's other columns: data_source, ground_truth, extra_info's
    max_turns: int | None = None  # turns that the run allows, where it does

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("an environment needs a name")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStart:
    """What the model reads first."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()  # offered by the chat template in every turn
    state_key: str | None = (
        None  # names the state that the first action is taken in; equal states have equal keys (GiGPO)
    )
    max_response_tokens: int | None = None  # of the first turn, where that is fewer than the run allows


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """The world's answer to an action."""

    messages: Sequence[Message] = ()  # observations, which the model reads next
    reward: float | None = None  # of this turn; None: this turn has none
    done: bool = False
    stop: str = ""  # with done: why, in a word to count by, such as "solved" or "lost"
    metrics: Mapping[str, float] = field(default_factory=dict)  # of this turn; summed over the episode
    action: str | None = (
        None  # the action as the environment took it, where that is not what was sampled (cut after a tag)
    )
    state_key: str | None = None  # names the state that the next action is taken in
    conversation: Sequence[Message] | None = (
        None  # all that the model reads next, where that is not what it read before
    )
    # with the action and the observations behind it: earlier turns were shortened or dropped. ``messages`` is not read then.
    tools: Sequence[Tool] | None = None  # with ``conversation``: what is offered from now on, where that has changed
    max_response_tokens: int | None = None  # of the next turn, where that is fewer than the run allows


class Env(Protocol):
    """One episode. ``step`` and ``reset`` may be coroutine functions; both may raise, which costs this episode only.

    One that has a method ``turn_was_cut`` is told by it, before ``step``, that the model was stopped by a token limit.
    """

    def reset(self, seed: int) -> EnvStart | Awaitable[EnvStart]:
        """Begin. Equal seeds give equal episodes for equal actions; all samples of a group get the same seed."""
        ...

    def step(self, action: str) -> EnvStep | Awaitable[EnvStep]:
        """Act. ``action`` is what the model wrote in its turn, a stop text included and special tokens left out; an action that
        makes no sense is no error: it gets an observation that says so."""
        ...

    def close(self) -> Mapping[str, float]:
        """Called once, also after an error. Returns metrics of the whole episode, of which the run shows the mean."""
        ...


# What a name in ENVS (a file of envs), or an import path, leads to: a function or a class, called as
# builder(spec, **spec.settings).
EnvBuilder = Callable[..., Env]


@dataclass(frozen=True, slots=True)
class EnvFailed:
    """An environment did not answer, or not with what it should: ``reason`` is a short word to count by."""

    reason: str
    detail: str


# What a host tells of an episode: the answer to ``start`` or ``step``, the metrics when it was closed, or that it is lost.
EnvEvent = EnvStart | EnvStep | Mapping[str, float] | EnvFailed


class EnvHost(Protocol):
    """Runs environments, many at once. For one thread. An episode that has failed is closed."""

    def start(self, episode: str, spec: EnvSpec, seed: int) -> None:
        """Make an environment and reset it, as soon as there is room for one more; first come, first served."""
        ...

    def step(self, episode: str, action: str, cut: bool = False) -> None:
        """``cut``: the model did not end its turn, a token limit did."""
        ...

    def finish(self, episode: str) -> None:
        """Close its environment, and tell its metrics."""
        ...

    def drop(self, episode: str) -> None:
        """Close its environment, and tell nothing more of it."""
        ...

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        """What has happened, episode by episode: at once when something has, or nothing will; else after ``timeout_s``."""
        ...

    def abandon(self) -> None:
        """Give up all episodes; what they would still say is not told."""
        ...

    def close(self) -> None:
        """End everything that it has started."""
        ...
