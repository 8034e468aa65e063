"""What episodes are played with: a host of environments, a writer of conversations in token ids, and rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from posttrain.interfaces.env import EnvHost, EnvSpec, Message
from posttrain.records.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Sampled:
    """One turn of the policy."""

    token_ids: tuple[int, ...]
    text: str  # without special tokens
    ended: bool  # the last token is an end token that the model wrote


@dataclass(frozen=True, slots=True)
class Following:
    """What comes behind a turn: of its tokens the first ``kept`` stay, then come ``token_ids``."""

    kept: int
    token_ids: tuple[int, ...]


class TurnWriter(Protocol):
    """Writes conversations in token ids."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[int, ...]:
        """The prompt of a first turn. Raises: DataError when the template refuses these messages."""
        ...

    def follow(
        self, history: Sequence[Message], sampled: Sampled, observations: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[Following, bool]:
        """What comes between a turn and the next; and whether the template leaves the text before it as it was.

        Args: history, the conversation before the turn; sampled.text may be cut at its end, and then so is what is kept.
        Raises: DataError when the template refuses these messages.
        """
        ...

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decoded, without special tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """What holds for every episode of a run."""

    max_response_tokens: int  # of one turn
    max_context_tokens: int  # the policy is not asked with more than this before it
    max_trajectory_tokens: int | None = None  # of all turns and observations together; None: no limit of its own
    max_sequence_tokens: int | None = None  # of a prompt and all that follows; a turn gets what is left of it
    max_turns: int | None = None  # None: the environment ends the episode, or the context does
    sample_per_turn: bool = False  # every turn is a training sample of its own, with what was before it as its prompt
    changed_history: Literal["split", "refuse", "append"] = (
        "split"  # what is done when the template edits earlier turns
    )


@dataclass(frozen=True, slots=True)
class Worlds:
    """What a run's episodes are played with."""

    host: EnvHost
    writer: TurnWriter
    rules: EpisodeRules
    spec_of: Callable[[Prompt], EnvSpec]
