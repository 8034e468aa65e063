"""Requests for turns of the policy: their choices, which wait until the run has sampled or refused each."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.data.chat_api import Refused
from posttrain.data.openai_api.answer import EchoedPrompt, answer
from posttrain.data.openai_api.request import EndpointRequest
from posttrain.interfaces.env import Message, Tool, TurnOptions
from posttrain.records.trajectories import Trajectory, Unfinished

MODEL = "policy"  # the name that requests give
# The policy as another player of an episode: its conversations are sampled, and neither trained nor measured
UNTRAINED = "policy-untrained"
LOOK_S = 0.1  # between two checks that a client is still connected


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The policy's turn; without a response the reason why there is none."""

    response: (
        Trajectory | None
    )  # with the text that the environment takes; without tokens where they are not known here
    prompt_tokens: int = 0
    response_tokens: int = 0
    why: str = ""
    status: int = 400


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRequest:
    """A choice of a request, pending until ``answer`` or ``refuse`` is called. ``gone``: its client has disconnected."""

    asked: EndpointRequest
    index: int = 0  # among the request's choices
    trained: bool = True  # False: of another player
    gone: Callable[[], bool] = lambda: False
    # Of all choices of the request: their indices with what came
    replies: queue.SimpleQueue[tuple[int, TurnAnswer | Unfinished]] = field(default_factory=queue.SimpleQueue)

    @property
    def messages(self) -> Sequence[Message]:
        return self.asked.messages or ()

    @property
    def tools(self) -> Sequence[Tool]:
        return self.asked.tools

    @property
    def prompt(self) -> str | tuple[int, ...] | None:
        """The prompt of a completion; None: it is a chat."""
        return self.asked.prompts[0] if self.asked.messages is None else None

    @property
    def goes_on(self) -> bool:
        """True for a chat that holds earlier turns of the policy; a completion shows none."""
        return self.prompt is None and any(message.get("role") == "assistant" for message in self.messages)

    @property
    def options(self) -> TurnOptions:
        asked = self.asked
        return TurnOptions(
            stop=asked.stop,
            seed=asked.seed,
            draws_as="" if asked.seed is None else f"answer {self.index}",
            top_logprobs=asked.top_logprobs,
            prompt_logprobs=asked.echo and asked.with_logprobs,
            temperature=None if asked.sampling is None else asked.sampling.temperature,
            grammar=asked.grammar,
            # What follows token ids is compared with the tokens that were sampled
            tokens=asked.with_logprobs or isinstance(self.prompt, tuple),
        )

    def answer(self, response: Trajectory, *, prompt_tokens: int, response_tokens: int) -> None:
        self.replies.put((self.index, TurnAnswer(response, prompt_tokens, response_tokens)))

    def refuse(self, why: str, status: int = 400) -> None:
        self.replies.put((self.index, TurnAnswer(None, why=why, status=status)))

    def grown(self, progress: Unfinished) -> None:
        """Take the tokens that were sampled since the last call."""
        self.replies.put((self.index, progress))


class Choices:
    """The choices of one request, pending until each has its answer."""

    def __init__(self, asked: EndpointRequest, gone: Callable[[], bool] = lambda: False, *, trained: bool = True):
        self.asked = asked
        first = TurnRequest(asked=asked, gone=gone, trained=trained)
        self.requests = [first, *(replace(first, index=index) for index in range(1, asked.answers))]
        self.answers: dict[int, TurnAnswer] = {}
        self._replies = first.replies
        self._gone = gone

    def next(self, on_gone: Callable[[], None]) -> tuple[int, TurnAnswer | Unfinished]:
        """Return what comes next: the index of a choice, and its next tokens, where they are reported while they are sampled, or
        its answer. ``on_gone`` is called when the client disconnects before it, and may answer.

        Raises: Refused when a choice is refused.
        """
        while True:
            try:
                index, found = self._replies.get(timeout=LOOK_S)
            except queue.Empty:
                if self._gone():
                    on_gone()
                continue
            if isinstance(found, TurnAnswer):
                if found.response is None:
                    raise Refused(found.why, found.status)
                self.answers[index] = found
            return index, found

    @property
    def complete(self) -> bool:
        return len(self.answers) == len(self.requests)

    def wait(self, on_gone: Callable[[], None]) -> None:
        """Wait for all answers. Raises: Refused."""
        while not self.complete:
            self.next(on_gone)

    @property
    def responses(self) -> list[Trajectory]:
        """The responses of a complete request, in the order of its choices."""
        return [answer.response for _, answer in sorted(self.answers.items()) if answer.response is not None]

    def whole(
        self,
        name: str,
        *,
        form: str,
        created: int,
        text_of: Callable[[int], str] = lambda token: "",
        echoed: Sequence[EchoedPrompt] = (),
    ) -> dict[str, Any]:
        """Build the body of the complete answer. Args: name, its id; otherwise as data.openai_api.answer."""
        answers = list(self.answers.values())
        prompt_tokens = answers[0].prompt_tokens
        whole = answer(name, MODEL, created, self.asked, prompt_tokens, self.responses, form, text_of, echoed)
        tokens = sum(each.response_tokens for each in answers)
        usage = {"completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        return {**whole, "usage": {**whole["usage"], **usage}}
