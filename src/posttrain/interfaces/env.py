"""Interface of an environment: the model acts, the environment answers, until the episode is over.

An environment is used for one episode and lives in the process that steps it, usually not the trainer's. An ``EnvSpec``
goes in; the results of ``reset``, ``step`` and ``close`` come out. All are plain values (numbers, texts, lists, mappings
with texts as keys), so that they can cross processes.

It exchanges messages, not token ids: ``steps.play`` keeps the sampled tokens exactly as sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished

# A chat message: role and content, and further keys of the chat template (name, tool_call_id, …).
Message = Mapping[str, Any]
# A function in the form chat templates expect: {"type": "function", "function": {"name": …}}.
Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """Specification of an environment, in plain values."""

    name: str  # in ENVS, or "package.module:Class", or "path/to/file.py:Class"
    # The environment's own settings: keyword arguments of its builder.
    settings: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] = ()  # the row's conversation; empty where the environment begins it
    # The row's other columns: data_source, ground_truth, and the entries of extra_info.
    row: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int | None = None  # the run's limit; None: no limit
    tool_call_form: str = "hermes"  # in which the model writes tool calls: a name in TOOL_FORMS
    saves: bool = False  # its state comes with every answer, where it is a SavedEnv
    # For an AskingEnv: the distribution that its turns are drawn from, and which of a turn's options the sampler honours.
    sampling: SamplingParams | None = None
    honours: Sequence[str] = ()  # of stop, seed, temperature, grammar
    number: int = 0  # of the episode, among those of its prompt

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("an environment needs a name")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStart:
    """The first messages of an episode."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()  # offered by the chat template in every turn
    # State in which the first action is taken; equal states have equal keys (GiGPO).
    state_key: str | None = None
    max_response_tokens: int | None = None  # limit of the first turn, when below the run's
    saved: Any = None  # set by the host: see SavedEnv; None: the environment cannot be continued


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """The environment's answer to an action."""

    messages: Sequence[Message] = ()  # observations, added to the conversation
    reward: float | None = None  # of this turn; None: this turn has none
    # Taken from this turn's share of the reward and from no other's, where turns are responses (environment.turn_is_response)
    penalty: float = 0.0
    done: bool = False
    stop: str = ""  # with done: the reason, a word to count by such as "solved" or "lost"
    # Metrics of this turn, summed over the episode.
    metrics: Mapping[str, float] = field(default_factory=dict)
    # The action as the environment understood it, when that differs from the sampled text (cut after a tag).
    action: str | None = None
    state_key: str | None = None  # state in which the next action is taken
    # The complete next conversation, action and observations included, when earlier turns were shortened or dropped.
    # ``messages`` is ignored then.
    conversation: Sequence[Message] | None = None
    tools: Sequence[Tool] | None = None  # with ``conversation``: the tools offered from now on; None: unchanged
    max_response_tokens: int | None = None  # limit of the next turn, when below the run's
    saved: Any = None  # as EnvStart.saved
    keeps: int | None = None  # with done, of an AskingEnv: how many tokens of the last answer count; None: all
    # With done, of an AskingEnv: of a conversation's (EnvAsk.line) tokens behind its first prompt, those that may be trained; a
    # conversation that is not named is not. None, also of one conversation: all that were sampled
    learned: Mapping[int, Sequence[bool] | None] | None = None


class Env(Protocol):
    """One episode. ``step`` and ``reset`` may be coroutine functions; both may raise, which fails this episode only.

    When a token limit cut the model's turn, its method ``turn_was_cut``, if it has one, is called before ``step``.
    """

    def reset(self, seed: int) -> EnvStart | Awaitable[EnvStart]:
        """Begin the episode. Equal seeds and actions give equal episodes; all samples of a group get the same seed."""
        ...

    def step(self, action: str) -> EnvStep | Awaitable[EnvStep]:
        """Take an action: the text of the model's turn, a stop text included, special tokens excluded. A meaningless action is
        not an error: the environment answers with an observation that explains it."""
        ...

    def close(self) -> Mapping[str, float]:
        """End the episode; called once, also after an error. Returns: metrics of the episode, which the run averages."""
        ...


class SavedEnv(Env, Protocol):
    """An environment whose episode can be saved and continued in another process, by a run that is resumed."""

    def state(self) -> Any:
        """Return everything that the next steps depend on, as a JSON value. Called after ``reset`` and ``step``."""
        ...

    def restore(self, state: Any) -> Awaitable[None] | None:
        """Continue a saved episode. Called in place of ``reset``, in a new environment of the same spec."""
        ...


@dataclass(frozen=True, slots=True)
class EnvRestored:
    """The environment of a saved episode is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Sampling options of one turn. A distribution of its own is recorded with its tokens, and trained as it was sampled."""

    stop: tuple[str, ...] = ()  # texts that end the turn, beside the run's
    seed: int | None = None  # of its draws; None: the run's
    draws_as: str = ""  # with a seed, the name that its draws depend on
    top_logprobs: int = 0  # likeliest tokens to report at every place
    prompt_logprobs: bool = False  # report the log-probs of its prompt
    temperature: float | None = None  # None: the run's
    grammar: str = ""  # that its text is kept within; "": none
    tokens: bool = False  # its token ids and their log-probs are given before its answer (``TokenEnv``)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvAsk:
    """A turn that an ``AskingEnv`` asks for; others of the episode may be waiting beside it."""

    turn: str  # its name, which no other turn of the episode has
    line: int  # its conversation; a known number continues behind that one's last answer
    messages: Sequence[Message]  # of a new conversation, all; else those that follow its last answer
    # In place of messages: a text or token ids that no template renders; of a known conversation, what follows its last answer
    prompt: str | tuple[int, ...] | None = None
    # With ``prompt``, of a known conversation: how many tokens of its last answer stay before it; None: all
    keeps: int | None = None
    tools: Sequence[Tool] = ()  # of a new conversation
    max_response_tokens: int | None = None  # limit of the turn, when below the run's
    # False: a conversation of another player, whom the policy plays, too; none of its tokens is trained or measured.
    trained: bool = True
    options: TurnOptions = TurnOptions()
    saved: Any = None  # as EnvStart.saved


@dataclass(frozen=True, slots=True)
class EnvWithdrawn:
    """A turn that is no longer wanted, answered or not: it does not count, and its conversation is as before it."""

    turn: str


class AskingEnv(Protocol):
    """One episode of an environment that asks for turns when it wants them, several at a time if it likes: an agent.

    It needs a process of its own. ``emit`` may be called by any thread until ``close`` returns, with turns asked for and
    withdrawn, with an EnvStep that is ``done`` as the end, or with an exception as a failure.
    """

    def begin(self, seed: int, emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]) -> None:
        """Start the episode and return."""
        ...

    def answer(self, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int) -> None:
        """Take the text of a turn. ``cut``: a token limit ended it."""
        ...

    def close(self) -> Mapping[str, float]:
        """End the episode; as ``Env.close``."""
        ...


class TokenEnv(AskingEnv, Protocol):
    """An AskingEnv that asks for the tokens of turns (``TurnOptions.tokens``)."""

    def sampled(self, turn: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take the tokens of a turn and their log-probs, in nats, before its answer. Not called by hosts that know no tokens."""
        ...


class SavedAskingEnv(AskingEnv, Protocol):
    """An AskingEnv whose episode can be saved while it waits for a turn. It asks for one at a time."""

    def state(self) -> Any:
        """Return everything that the rest of the episode depends on, as a JSON value. Called when it asks for a turn."""
        ...

    def restore(self, state: Any, emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]) -> None:
        """Continue a saved episode, in place of ``begin``: it waits for the turn that it asked for last."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """A turn of the policy in a finished conversation."""

    # The messages that it read since its turn before; of the first turn, and after an edited history, all of them. The prompt
    # of a completion is a message of the user.
    read: Sequence[Message]
    action: str  # the text that was sampled, tool calls as the model wrote them, special tokens excluded
    cut: bool = False  # a token limit ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedConversation:
    """A conversation that a program outside the run has had with the policy, for the environment that scores it."""

    # All messages as the program sent and received them, the policy's last one included; after edited histories, the newest.
    messages: Sequence[Message]
    turns: Sequence[PlayedTurn]  # in the order in which they were answered
    # False: an environment that is played again may have said something else than the program showed the policy.
    compared: bool = True


class ScoringEnv(Protocol):
    """An environment that scores finished conversations. One without ``score`` scores them when its episode is played again, with
    the conversation's turns as the actions."""

    def score(self, conversation: FinishedConversation) -> Any:
        """Return the reward, a number, or {"reward": ..., "metrics": {...}}; None leaves it to the run's reward terms. May be a
        coroutine function, and may raise, which fails this episode only."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvScored:
    """An environment's verdict on a finished conversation."""

    reward: float | None  # None: the run's reward terms score it
    stop: str = ""  # as EnvStep.stop
    metrics: Mapping[str, float] = field(default_factory=dict)


# A name in ENVS (a file of envs), or an import path, leads to one of these: a function or a class, called as
# builder(spec, **spec.settings).
EnvBuilder = Callable[..., Env | AskingEnv | ScoringEnv]


# Reasons of EnvFailed for which the messages are to blame
TEMPLATE = "template"  # the chat template refuses them
TOO_LONG = "prompt_too_long"


@dataclass(frozen=True, slots=True)
class EnvFailed:
    """The environment failed to answer, or gave an invalid answer: ``reason`` is a short word to count by."""

    reason: str
    detail: str


# An event of an episode: the answer to ``start`` or ``step``, the metrics after ``finish``, or the failure that ended it. Of an
# AskingEnv: the turns that it asks for and withdraws, and its end, an EnvStep. Of a finished conversation: its score.
EnvEvent = EnvStart | EnvRestored | EnvStep | EnvAsk | EnvWithdrawn | EnvScored | Mapping[str, float] | EnvFailed


@runtime_checkable
class TokenTaker(Protocol):
    """A host that takes the tokens of turns."""

    def sampled(self, episode: str, turn: str, response: Trajectory) -> None:
        """Take the tokens of a turn that an AskingEnv has asked for, before its answer."""
        ...


@runtime_checkable
class TokenHost(TokenTaker, Protocol):
    """A host that takes the tokens of turns, also while they are sampled, and may refuse a turn."""

    def refuse(self, episode: str, turn: str, why: str) -> None:
        """Refuse a turn that cannot be sampled: the chat template rejects its messages, or they are too long. The episode is as
        before it."""
        ...

    def streams(self, episode: str, turn: str) -> bool:
        """Return True when ``grown`` is wanted for a turn."""
        ...

    def grown(self, episode: str, turn: str, progress: Unfinished) -> None:
        """Take the tokens of a turn that were sampled since the last call."""
        ...


class EnvHost(Protocol):
    """Runs many environments concurrently. Used by one thread. An episode that failed is closed."""

    def load(self, names: Sequence[str]) -> dict[str, str]:
        """Import environments, and code of the user's own (``path/to/file.py:Name``), before the first episode. Returns: the
        errors of those that cannot be imported, by name."""
        ...

    def start(self, episode: str, spec: EnvSpec, seed: int, saved: Any = None) -> None:
        """Create an environment and reset it, as soon as there is room; episodes start in the order of the calls. ``saved``: the
        state of a SavedEnv, from which it continues."""
        ...

    def step(self, episode: str, action: str, cut: bool = False) -> None:
        """Step an environment. ``cut``: a token limit, not the model, ended the turn."""
        ...

    def answer(
        self, episode: str, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int
    ) -> None:
        """Answer a turn that an AskingEnv has asked for."""
        ...

    def finish(self, episode: str) -> None:
        """Close its environment, and report its metrics."""
        ...

    def drop(self, episode: str, failed: EnvFailed | None = None) -> None:
        """Close its environment, and report no further event of it. ``failed``: what happened to the episode, where the run did
        not just do without it."""
        ...

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        """Return the events so far: at once when there are some, or none can come; else after at most ``timeout_s``."""
        ...

    def abandon(self) -> None:
        """Drop all episodes, with the events not yet returned."""
        ...

    def close(self) -> None:
        """End all processes and threads that it started."""
        ...


class ScoringHost(EnvHost, Protocol):
    """A host whose environments score finished conversations, too."""

    def task(self, episode: str, spec: EnvSpec, seed: int) -> None:
        """Create an environment, as soon as there is room, for the task that it sets: an EnvStart, or an EnvFailed."""
        ...

    def score(self, episode: str, spec: EnvSpec, seed: int, conversation: FinishedConversation) -> None:
        """Score a conversation by the environment of the episode, which is created where ``task`` was not called: an EnvScored,
        and then ``finish``, or an EnvFailed."""
        ...
