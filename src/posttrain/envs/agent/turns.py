"""The turns of one episode that a program asks for over HTTP: which conversation each continues, and which are waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

from posttrain.data.chat_api import added_messages, assistant_message
from posttrain.data.openai_api.answer import shown_text
from posttrain.data.openai_api.own_sampling import before_stop
from posttrain.data.openai_api.request import EndpointRequest
from posttrain.envs.agent.listener import run_sampling
from posttrain.envs.agent.turn_requests import TurnRequest
from posttrain.interfaces.env import EnvAsk, EnvSpec, EnvStep, EnvWithdrawn, FinishedConversation, Message, PlayedTurn
from posttrain.records.trajectories import StopReason, Trajectory, Unfinished

Added = Sequence[Message] | str | tuple[int, ...]  # messages of a chat, text or token ids of a completion
Emit = Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The last answered request of a conversation, and its answer."""

    request: TurnRequest
    answer: Message  # {"text": …} of a completion
    response: Trajectory
    # True: the client's text is what was sampled. Otherwise a stop text of its own is missing in it, or an end token.
    as_sampled: bool

    def added(self, request: TurnRequest) -> Added | None:
        """Return what a request adds; None when it does not go on behind the answer."""
        if request.trained != self.request.trained:
            return None
        before, now = self.request.prompt, request.prompt
        if before is not None or now is not None:
            return None if before is None or now is None else self._added_raw(before, now)
        if list(request.tools) != list(self.request.tools):
            return None
        return added_messages(self.request.messages, self.answer, request.messages)

    def _added_raw(self, before: str | tuple[int, ...], now: str | tuple[int, ...]) -> str | tuple[int, ...] | None:
        """Return what a completion adds: token ids are compared with those that were sampled, texts with the answer."""
        if isinstance(before, str) and isinstance(now, str):
            said = before + str(self.answer["text"])
            return now[len(said) :] if now.startswith(said) and now != said else None
        if isinstance(before, str) or isinstance(now, str) or not self.response.token_ids:
            return None
        sampled = (*before, *self.response.token_ids)
        return now[len(sampled) :] if now[: len(sampled)] == sampled and now != sampled else None

    def continues(self, request: TurnRequest) -> Added | None:
        """Return what ``added`` does; None also when the tokens before it would be others than those that were sampled."""
        return self.added(request) if self.as_sampled or isinstance(request.prompt, tuple) else None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request that the policy is answering, and its conversation before it."""

    request: TurnRequest
    line: int
    added: Added  # to the conversation before it
    before: _Conversation | None


class AskedTurns:
    """Requests are turns, and several may wait at a time. One that extends a conversation of the episode continues it; any other
    begins one of its own. All methods may be called by any thread."""

    def __init__(
        self,
        spec: EnvSpec,
        emit: Emit,
        lock: AbstractContextManager[Any] | None = None,
        *,
        start: str = "",
    ):
        """Args: start, of the names of its turns, where the episode has had other conversations."""
        self._spec, self._start = spec, start
        self._emit = emit
        self.lock = lock or threading.RLock()
        self._pending: dict[str, _Pending] = {}  # by the names of their turns
        self._conversations: dict[int, _Conversation] = {}  # that with the newest answer last
        self._played: list[tuple[Added, str, bool]] = []  # answered turns: read, shown text, cut
        self._asked = 0
        self._lines = 0
        self.turns = 0  # of the trained player that were answered
        self.refused = 0
        self.abandoned = 0
        self.over = False

    @property
    def waiting(self) -> bool:
        return bool(self._pending)

    def requested(self, requests: Sequence[TurnRequest]) -> None:
        """Take the choices of a request, which are answered later, or refused at once."""
        with self.lock:
            for turn in [turn for turn, each in self._pending.items() if each.request.gone()]:
                self._withdraw(turn)  # before a second try of the same request is compared with what was said
            if self.over:
                requests[0].refuse("the episode is over", 503)
                return
            waiting = sum(each.request.trained for each in self._pending.values())
            most = self._spec.max_turns if requests[0].trained else None
            if most is not None and self.turns + waiting + len(requests) > most:
                self.refused += 1
                left = most - self.turns - waiting
                what = f"{left} turns of this episode are left, and n is {len(requests)}"
                used = f"all {most} turns of this episode are used"
                requests[0].refuse(f"{what if left > 0 else used} (environment.max_turns)")
                return
            for request in requests:
                self._request(request)

    def _request(self, request: TurnRequest) -> None:
        self._asked += 1
        turn, (line, added) = f"{self._start}{self._asked}", self._line_of(request)
        self._pending[turn] = _Pending(request, line, added, self._conversations.pop(line, None))
        raw, wanted = added if request.prompt is not None else None, request.asked.max_tokens
        self._emit(
            EnvAsk(
                turn=turn,
                line=line,
                messages=() if raw is not None else cast(Sequence[Message], added),
                prompt=cast(str | tuple[int, ...] | None, raw),
                tools=request.tools,
                max_response_tokens=wanted if wanted < run_sampling(self._spec).max_response_tokens else None,
                trained=request.trained,
                options=request.options,
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
        tokens: tuple[Sequence[int], Sequence[float]] | None = None,
    ) -> None:
        """Answer a request, unless its client has gone. ``response``, or ``tokens`` and their log-probs: the turn's tokens, where
        they are known here."""
        with self.lock:
            pending = self._pending.get(turn)
            if pending is None:
                return  # withdrawn meanwhile
            request = pending.request
            if request.gone():
                self._withdraw(turn)
                return
            del self._pending[turn]
            self.turns += request.trained
            if request.asked.with_logprobs and response is None and tokens is None:
                request.refuse("the tokens of this episode's turns are not known here, so there are no logprobs")
                return
            said = _said(turn, action, request.asked, cut=cut, response=response)
            if tokens is not None:
                said = replace(said, token_ids=tuple(tokens[0]), logprobs=tuple(tokens[1]))
            shown = shown_text(request.asked, said)
            told: Message = {"text": shown}
            if request.prompt is None:
                told = assistant_message(shown, turn, tools=request.tools, form=self._spec.tool_call_form)
            ended = request.prompt is not None and said.stop_reason is StopReason.EOS
            as_sampled = shown == action and not ended
            self._conversations[pending.line] = _Conversation(request, told, said, as_sampled)
            if request.trained:
                self._played.append((pending.added, shown, cut))
        request.answer(said, prompt_tokens=prompt_tokens, response_tokens=response_tokens)

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
            return turn in self._pending and self._pending[turn].request.asked.stream

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
                if pending.before is not None:
                    self._conversations[pending.line] = pending.before
                pending.request.refuse(why, status)
            self._pending.clear()

    def finished(self, decode: Callable[[Sequence[int]], str], *, compared: bool) -> FinishedConversation:
        """Return the conversation for an environment that scores it. At least one turn was answered.

        Args: decode, token ids to text, for completions; compared, as in FinishedConversation.
        """
        with self.lock:
            newest = next(reversed(self._conversations.values()))
            asked, said = newest.request, newest.answer
            if asked.prompt is None:
                messages = [*asked.messages, said]
            else:
                messages = [*_as_messages(asked.prompt, decode), {"role": "assistant", "content": said["text"]}]
            turns = [
                PlayedTurn(read=_as_messages(read, decode), action=text, cut=cut) for read, text, cut in self._played
            ]
            return FinishedConversation(messages=messages, turns=turns, compared=compared)

    def without(self, left_out: Sequence[Sequence[Sequence[int]]]) -> Mapping[int, None]:
        """Return the conversations to train, as ``EnvStep.learned`` has them.

        Args: left_out, (prompt, response) in token ids of turns that are not trained, nor are the conversations they ended.
        """
        dropped = {(tuple(prompt), tuple(response)) for prompt, response in left_out}
        with self.lock:
            return {
                line: None
                for line, each in self._conversations.items()
                if (each.request.prompt, tuple(each.response.token_ids)) not in dropped
            }

    def counts(self) -> Mapping[str, float]:
        """Return the numbers of turns, of requests beyond the limit of turns, and of requests that were abandoned."""
        counts = {"num_actions": self.turns, "refused_turns": self.refused, "abandoned_turns": self.abandoned}
        return {name: float(count) for name, count in counts.items()}

    def _line_of(self, request: TurnRequest) -> tuple[int, Added]:
        """Return the conversation that a request continues (the longest that fits, or a new one), and what it adds to it."""
        found = [
            (line, added)
            for line, each in self._conversations.items()
            if (added := each.continues(request)) is not None
        ]
        if found:
            return min(found, key=lambda each: len(each[1]))
        self._lines += 1
        return self._lines, request.messages if request.prompt is None else request.prompt

    def _withdraw(self, turn: str) -> None:
        pending = self._pending.pop(turn)
        self.abandoned += 1
        if pending.before is not None:
            self._conversations[pending.line] = pending.before
        pending.request.refuse("the client has left", 499)
        if not self.over:
            self._emit(EnvWithdrawn(turn))


def _as_messages(read: Added, decode: Callable[[Sequence[int]], str]) -> Sequence[Message]:
    """Return messages; of a completion, its text as a message of the user."""
    if isinstance(read, str):
        return [{"role": "user", "content": read}]
    if read and isinstance(read[0], int):
        return [{"role": "user", "content": decode(cast(Sequence[int], read))}]
    return cast(Sequence[Message], read)


def _said(turn: str, action: str, asked: EndpointRequest, *, cut: bool, response: Trajectory | None) -> Trajectory:
    """Return a turn with the text that the environment takes, named after the turn. ``response``: its tokens, if known."""
    if response is not None:
        return replace(response, sample_id=turn, text=action)
    stopped = before_stop(action, asked.stop) != action
    reason = StopReason.STOP_TEXT if stopped else StopReason.LENGTH if cut else StopReason.EOS
    return Trajectory(sample_id=turn, token_ids=(), logprobs=(), text=action, stop_reason=reason, policy_version=0)
