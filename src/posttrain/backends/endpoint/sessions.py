"""Token ids of a client's messages: a continued conversation keeps the sampled tokens.

A client sends earlier responses back as text, which may tokenize differently from what the model sampled. When a request of a
session extends an earlier one and its answer, the earlier tokens are kept.
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
class SessionTurn:
    """The last request and answer of a session."""

    messages: Sequence[Message]
    tools: Sequence[Message]
    prompt_ids: tuple[int, ...]
    response: Trajectory
    told: Message  # the answer as sent to the client


class Sessions:
    """The last turns of conversations, by name; the least recently used are dropped.

    One thread at a time calls ``prompt_of``, one ``remember``; they may be two.
    """

    def __init__(self, writer: TemplateTurns, most: int):
        self._writer = writer
        self._most = most
        self._turns: OrderedDict[str, SessionTurn] = OrderedDict()

    def prompt_of(
        self, session: str, messages: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[tuple[int, ...], bool]:
        """Return the tokens of a request, and True when they continue those sampled before.

        Raises: DataError when the chat template rejects the messages, ModelError when there is none.
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

    def remember(self, session: str, turn: SessionTurn) -> None:
        self._turns[session] = turn
        self._turns.move_to_end(session)
        while len(self._turns) > self._most:
            self._turns.popitem(last=False)
