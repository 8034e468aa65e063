"""Interfaces for multi-turn episodes: a host of environments, a writer of conversations in token ids, and rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from posttrain.interfaces.env import EnvHost, EnvSpec, Message
from posttrain.records.images import PromptImages
from posttrain.records.prompts import Prompt


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One sampled turn of the policy."""

    token_ids: tuple[int, ...]
    text: str  # without special tokens
    ended: bool  # the last token is an end token that the model wrote


@dataclass(frozen=True, slots=True)
class Following:
    """Tokens of the next turn's prompt: the first ``kept`` tokens of the turn, then ``token_ids``."""

    kept: int
    token_ids: tuple[int, ...]


class TurnWriter(Protocol):
    """Renders conversations as token ids."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[int, ...]:
        """Render the prompt of a first turn. Raises: DataError when the template refuses these messages."""
        ...

    def follow(
        self,
        history: Sequence[Message],
        sampled: SampledTurn,
        observations: Sequence[Message],
        tools: Sequence[Message],
    ) -> tuple[Following, bool]:
        """Render the tokens between a turn and the next. Returns: them, and True when the template leaves earlier text unchanged.

        Args: history, the conversation before the turn; sampled.text may be cut at its end, and ``kept`` is cut alike.
        Raises: DataError when the template refuses these messages.
        """
        ...

    def raw_ids(self, prompt: str | tuple[int, ...], *, begins: bool) -> tuple[int, ...]:
        """Return the token ids of a prompt that no template renders, or with ``begins`` False of what follows one.

        Raises: DataError as data.raw_prompts.
        """
        ...

    def images_of(self, messages: Sequence[Message]) -> PromptImages | None:
        """Return the images of a conversation, whose tokens are among those rendered; None without any.

        Raises: DataError for one that cannot be read.
        """
        ...

    def holds_image_token(self, token_ids: Sequence[int]) -> bool:
        """Return True when a token among these stands for an image."""
        ...

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, without special tokens."""
        ...


RewardOf = Literal["episode", "last_sample", "last_turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """Limits of every episode of a run."""

    max_response_tokens: int  # per turn
    max_context_tokens: int  # longest prompt that is sampled from; a longer one ends the episode
    max_trajectory_tokens: int | None = None  # of all turns and observations together; None: no limit of its own
    max_sequence_tokens: int | None = None  # of a prompt with all turns and observations; limits the next turn
    max_turns: int | None = None  # None: the environment ends the episode, or the context does
    sample_per_turn: bool = False  # every turn is a training sample, with the conversation before it as its prompt
    reward_of: RewardOf = "episode"  # turns whose rewards count
    # Handling of a template that edits earlier turns.
    changed_history: Literal["split", "refuse", "append"] = "split"


@dataclass(frozen=True, slots=True)
class Worlds:
    """The environment host, the turn writer and the rules of a run's episodes."""

    host: EnvHost
    writer: TurnWriter
    rules: EpisodeRules
    spec_of: Callable[[Prompt], EnvSpec]
    notes: tuple[str, ...] = ()  # for the user, when the run begins
