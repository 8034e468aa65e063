"""Existing agents as environments: a function or program that requests its turns from an OpenAI-compatible endpoint.

    agent (a process of its own) ──HTTP on loopback──▶ listener.py ──▶ Agent ──▶ the run's sampler

Every request of the agent is a turn of the episode: the policy's response is returned to the agent, and the next request is
the observation. Requests do not wait for each other. One that extends a conversation of the episode, whichever was last, goes on
behind the tokens sampled there; any other one (edited history, a new conversation) begins a training sample of its own. A
request whose client disconnects (its time limit is over, and it tries again) does not count. Nothing is tokenised here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.chat_api import added_messages, assistant_message
from posttrain.envs.agent.episode import AgentEpisode
from posttrain.envs.agent.listener import Listener, TurnRequest
from posttrain.envs.agent.process import AgentEnd, AgentProcess, start_command, start_function, with_result
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import AskingEnv, EnvAsk, EnvSpec, EnvStep, EnvWithdrawn, Message
from posttrain.registry import ENVS

__all__ = ["Agent", "AgentEpisode", "agent"]


class AgentFailed(Exception):
    """The agent ended without returning. The message describes how."""


@ENVS.register("agent")
def agent(
    spec: EnvSpec,
    *,
    function: str | None = None,
    command: Sequence[str] | None = None,
    any_sampling: bool = False,
    options: Mapping[str, Any] | None = None,
) -> AskingEnv:
    """An agent that plays the episode of a row.

    Args: function, package.module:function or path/to/file.py:function, is called with an AgentEpisode and ``options`` as keyword
        arguments, in a process of its own, and returns a reward, or {"reward": ..., "metrics": {...}}, or None to leave it to the
        run's reward terms; it may be a coroutine function. command, a program and its arguments, finds the address and the
        token in OPENAI_BASE_URL and OPENAI_API_KEY, reads the row with GET $POSTTRAIN_URL/episode, which includes ``options``,
        and sends its reward with POST $POSTTRAIN_URL/result. any_sampling ignores temperature, top_p and seed of its requests:
        the run determines the sampling.
    Raises: ConfigError unless exactly one of function and command is given.
    """
    if (function is None) == (command is None):
        what = "an agent is a function or a command, and " + (
            "neither is given" if command is None else "both are given"
        )
        raise ConfigError(Problem(what, fix="give environment.settings.function, or environment.settings.command"))
    if command is not None and (isinstance(command, str) or not command):
        raise ConfigError(
            Problem("command must be a list: a program and its arguments", fix="write [python, agent.py]")
        )
    return Agent(spec, function, command, any_sampling=any_sampling, options=options or {})


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The last answered request of a conversation, and its answer."""

    request: TurnRequest
    answer: Message

    def added(self, request: TurnRequest) -> Sequence[Message] | None:
        """Return the messages that a request adds; None when it does not go on behind the answer."""
        if list(request.tools) != list(self.request.tools):
            return None
        return added_messages(self.request.messages, self.answer, request.messages)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request that the policy is answering, and its conversation before it."""

    request: TurnRequest
    line: int
    before: _Conversation | None


class Agent:
    """One episode of an agent, as an AskingEnv: requests are turns, and several may wait at a time."""

    def __init__(
        self,
        spec: EnvSpec,
        function: str | None,
        command: Sequence[str] | None,
        *,
        any_sampling: bool,
        options: Mapping[str, Any],
    ):
        self._spec = spec
        self._function = function
        self._command = command
        self._options = options
        self._listener = Listener(self._requested, any_sampling=any_sampling, on_gone=self._gone)
        self._process: AgentProcess | None = None
        self._emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None] = lambda event: None
        self._lock = threading.RLock()  # of what follows: requests come in threads
        self._pending: dict[str, _Pending] = {}  # by the names of their turns
        self._conversations: dict[int, _Conversation] = {}
        self._asked = 0
        self._lines = 0
        self._turns = 0
        self._refused = 0
        self._abandoned = 0
        self._over = False
        self._metrics: Mapping[str, float] = {}

    def begin(self, seed: int, emit: Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]) -> None:
        """Start the agent."""
        self._emit = emit
        episode = AgentEpisode(
            base_url=f"{self._listener.url}/v1",
            api_key=self._listener.token,
            messages=self._spec.messages,
            row=self._spec.row,
            seed=seed,
            max_turns=self._spec.max_turns,
        )
        if self._function is not None:
            self._process = start_function(self._function, episode, self._options, self._listener)
        else:
            assert self._command is not None
            self._process = start_command(self._command, episode)
        self._listener.start(episode, self._options)
        self._process.watch(self._ended)

    def answer(self, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int) -> None:
        """Answer a request, unless its client has gone."""
        with self._lock:
            pending = self._pending.get(turn)
            if pending is None:
                return  # withdrawn meanwhile
            request = pending.request
            if request.gone():
                self._withdraw(turn)
                return
            del self._pending[turn]
            self._turns += 1
            message = assistant_message(action, turn, with_tools=bool(request.tools))
            self._conversations[pending.line] = _Conversation(request, message)
        request.answer(message, cut=cut, prompt_tokens=prompt_tokens, response_tokens=response_tokens)

    def close(self) -> Mapping[str, float]:
        """End the agent and its child processes. Returns: its own metrics, and the numbers of turns, of requests beyond the limit
        of turns, and of requests that the agent abandoned."""
        with self._lock:
            self._over = True
        if self._process is not None:
            self._process.kill()
        self._listener.close()
        counts = {"num_actions": self._turns, "refused_turns": self._refused, "abandoned_turns": self._abandoned}
        return {**self._metrics, **{name: float(count) for name, count in counts.items()}}

    def _requested(self, request: TurnRequest) -> None:
        with self._lock:
            for turn in [turn for turn, each in self._pending.items() if each.request.gone()]:
                self._withdraw(turn)  # before a second try of the same request is compared with what was said
            if self._over:
                request.refuse("the episode is over", 503)
                return
            if self._turns + len(self._pending) == self._spec.max_turns:
                self._refused += 1
                request.refuse(f"all {self._spec.max_turns} turns of this episode are used (environment.max_turns)")
                return
            self._asked += 1
            turn, (line, added) = f"{self._asked}", self._line_of(request)
            self._pending[turn] = _Pending(request, line, self._conversations.pop(line, None))
            self._emit(
                EnvAsk(
                    turn=turn, line=line, messages=added, tools=request.tools, max_response_tokens=request.max_tokens
                )
            )

    def _line_of(self, request: TurnRequest) -> tuple[int, Sequence[Message]]:
        """Return the conversation that a request continues (the longest that fits, or a new one), and its new messages."""
        found = [
            (line, added) for line, each in self._conversations.items() if (added := each.added(request)) is not None
        ]
        if found:
            return min(found, key=lambda each: len(each[1]))
        self._lines += 1
        return self._lines, request.messages

    def _gone(self, request: TurnRequest) -> None:
        with self._lock:
            for turn in [turn for turn, each in self._pending.items() if each.request is request]:
                self._withdraw(turn)
        request.refuse("the client has left", 499)

    def _withdraw(self, turn: str) -> None:
        pending = self._pending.pop(turn)
        self._abandoned += 1
        if pending.before is not None:
            self._conversations[pending.line] = pending.before
        pending.request.refuse("the client has left", 499)
        if not self._over:
            self._emit(EnvWithdrawn(turn))

    def _ended(self, end: AgentEnd) -> None:
        """The agent has ended by itself: with a result, or with a failure, which the limit of turns may have caused."""
        with self._lock:
            if self._over:
                return
            self._over = True
            end = with_result(end, self._listener.result)
            if not self._turns:
                self._emit(AgentFailed(end.failure or "the agent ended without requesting a turn"))
            elif end.failure is None:
                self._metrics = end.metrics
                self._emit(EnvStep(done=True, stop="ended", reward=end.reward))
            elif self._refused:
                self._emit(EnvStep(done=True, stop="max_turns"))
            else:
                self._emit(AgentFailed(end.failure))
