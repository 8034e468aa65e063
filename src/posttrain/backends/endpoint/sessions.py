"""From a client's messages to token ids: a conversation that goes on does so behind the very tokens that were sampled.

A client sends back what it was told as text, and the same text may be written in other tokens than the model wrote it in.
Where a request of a session is an earlier one with the answer and something new behind it, its tokens are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.chat_api import added_messages
from posttrain.data.turns import TemplateTurns
from posttrain.interfaces.worlds import SampledTurn
from posttrain.records.trajectories import StopReason, Trajectory

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a session was asked and answered last."""

    messages: Sequence[Message]
    tools: Sequence[Message]
    prompt_ids: tuple[int, ...]
    response: Trajectory
    told: Message  # the answer as the client got it


class Sessions:
    """The last turns of conversations, by name; those that were silent longest are forgotten.

    One thread at a time calls ``prompt_of``, one ``remember``; they may be two.
    """

    def __init__(self, writer: TemplateTurns, most: int):
        self._writer = writer
        self._most = most
        self._turns: OrderedDict[str, Turn] = OrderedDict()

    def prompt_of(
        self, session: str, messages: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[tuple[int, ...], bool]:
        """The tokens of a request, and whether it goes on behind those that were sampled before.

        Raises: DataError when the chat template refuses the messages, ModelError when there is none.
        """
        before = self._turns.get(session)
        if before is not None and list(before.tools) == list(tools):
            observations = added_messages(before.messages, before.told, messages)
            if observations is not None:
                response = before.response
                sampled = SampledTurn(response.token_ids, response.text, response.stop_reason is StopReason.EOS)
                following, unchanged = self._writer.follow(before.messages, sampled, observations, tools)
                if unchanged:
                    kept = response.token_ids[: following.kept]
                    return (*before.prompt_ids, *kept, *following.token_ids), True
        return self._writer.begin(messages, tools), False

    def remember(self, session: str, turn: Turn) -> None:
        self._turns[session] = turn
        self._turns.move_to_end(session)
        while len(self._turns) > self._most:
            self._turns.popitem(last=False)
