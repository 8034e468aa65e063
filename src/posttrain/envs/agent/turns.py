"""The turns of one episode that a program asks for over HTTP: which conversation each continues, and which are waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from posttrain.data.chat_api import added_messages, assistant_message
from posttrain.envs.agent.listener import TurnRequest
from posttrain.interfaces.env import EnvAsk, EnvSpec, EnvStep, EnvWithdrawn, Message
from posttrain.records.trajectories import Trajectory, Unfinished

Emit = Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]


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


class AskedTurns:
    """Requests are turns, and several may wait at a time. One that extends a conversation of the episode continues it; any other
    begins one of its own. All methods may be called by any thread."""

    def __init__(self, spec: EnvSpec, emit: Emit, lock: AbstractContextManager[Any] | None = None):
        self._spec = spec
        self._emit = emit
        self.lock = lock or threading.RLock()
        self._pending: dict[str, _Pending] = {}  # by the names of their turns
        self._conversations: dict[int, _Conversation] = {}
        self._asked = 0
        self._lines = 0
        self.turns = 0  # that were answered
        self.refused = 0
        self.abandoned = 0
        self.over = False

    @property
    def waiting(self) -> bool:
        return bool(self._pending)

    def requested(self, request: TurnRequest) -> None:
        """Take a request, which is answered later, or refused at once."""
        with self.lock:
            for turn in [turn for turn, each in self._pending.items() if each.request.gone()]:
                self._withdraw(turn)  # before a second try of the same request is compared with what was said
            if self.over:
                request.refuse("the episode is over", 503)
                return
            if self.turns + len(self._pending) == self._spec.max_turns:
                self.refused += 1
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

    def extends(self, request: TurnRequest) -> bool:
        """Return True when a request continues a conversation of this episode."""
        with self.lock:
            return not self.over and any(each.added(request) is not None for each in self._conversations.values())

    def answer(
        self,
        turn: str,
        action: str,
        *,
        cut: bool,
        prompt_tokens: int,
        response_tokens: int,
        response: Trajectory | None = None,
    ) -> None:
        """Answer a request, unless its client has gone."""
        with self.lock:
            pending = self._pending.get(turn)
            if pending is None:
                return  # withdrawn meanwhile
            request = pending.request
            if request.gone():
                self._withdraw(turn)
                return
            del self._pending[turn]
            self.turns += 1
            message = assistant_message(action, turn, tools=request.tools, form=self._spec.tool_call_form)
            self._conversations[pending.line] = _Conversation(request, message)
        request.answer(
            message, cut=cut, prompt_tokens=prompt_tokens, response_tokens=response_tokens, response=response
        )

    def refuse(self, turn: str, why: str) -> None:
        """Refuse a request that cannot be sampled; its conversation is as before it."""
        with self.lock:
            pending = self._pending.pop(turn, None)
            if pending is None:
                return  # withdrawn meanwhile
            if pending.before is not None:
                self._conversations[pending.line] = pending.before
            pending.request.refuse(why)

    def streams(self, turn: str) -> bool:
        """Return True when a request wants its tokens while they are sampled."""
        with self.lock:
            return turn in self._pending and self._pending[turn].request.stream

    def grown(self, turn: str, progress: Unfinished) -> None:
        """Give a request the tokens that were sampled since the last call."""
        with self.lock:
            if turn in self._pending:
                self._pending[turn].request.grown(progress)

    def gone(self, request: TurnRequest) -> None:
        """The client of a request has disconnected."""
        with self.lock:
            for turn in [turn for turn, each in self._pending.items() if each.request is request]:
                self._withdraw(turn)
        request.refuse("the client has left", 499)

    def end(self, why: str, status: int = 503) -> None:
        """Accept no further requests, and refuse those that wait, with an HTTP status."""
        with self.lock:
            self.over = True
            for pending in self._pending.values():
                pending.request.refuse(why, status)
            self._pending.clear()

    def counts(self) -> Mapping[str, float]:
        """Return the numbers of turns, of requests beyond the limit of turns, and of requests that were abandoned."""
        counts = {"num_actions": self.turns, "refused_turns": self.refused, "abandoned_turns": self.abandoned}
        return {name: float(count) for name, count in counts.items()}

    def _line_of(self, request: TurnRequest) -> tuple[int, Sequence[Message]]:
        """Return the conversation that a request continues (the longest that fits, or a new one), and its new messages."""
        found = [
            (line, added) for line, each in self._conversations.items() if (added := each.added(request)) is not None
        ]
        if found:
            return min(found, key=lambda each: len(each[1]))
        self._lines += 1
        return self._lines, request.messages

    def _withdraw(self, turn: str) -> None:
        pending = self._pending.pop(turn)
        self.abandoned += 1
        if pending.before is not None:
            self._conversations[pending.line] = pending.before
        pending.request.refuse("the client has left", 499)
        if not self.over:
            self._emit(EnvWithdrawn(turn))
