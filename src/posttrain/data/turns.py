"""Multi-turn conversations in token ids: sampled tokens stay as sampled, and the tokens in between are appended.

A conversation is never re-tokenised. After a turn the chat template renders the whole conversation again, as text; the part
after the assistant's last message (end of the turn, observations, beginning of the next turn) is tokenised and appended.
That is correct where the template leaves the earlier text unchanged. Some do not: they remove the thoughts from earlier
turns, or move tools. So the text is compared, and the caller decides how to handle a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.data.chat_api import content_of
from posttrain.data.raw_prompts import raw_prompt_ids
from posttrain.data.templates import ids_of, render
from posttrain.data.tool_forms import DEFAULT
from posttrain.data.tool_forms.written import as_message, decoded, history_of, probe_message, special_ids
from posttrain.data.turn_images import TurnImages
from posttrain.errors import DataError, Problem
from posttrain.interfaces.env import Message
from posttrain.interfaces.worlds import Following, SampledTurn
from posttrain.records.images import PromptImages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for the assistant's text, to find what a template writes after it. No template interprets or changes it.
_PROBE = "9c1f0b7e"


@dataclass(frozen=True, slots=True)
class TemplateTurns:
    """Renders every turn as a message of the chat template.

    Args: close_turns appends the template's end of a turn to one that the model did not end itself (a stop text, the token
        limit); without it the observations follow directly. images places those of a vision model. form, of tool calls: its
        marks belong to the text where they are special tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any]
    close_turns: bool = True
    images: TurnImages = field(default_factory=TurnImages)
    form: str = DEFAULT

    def begin(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[int, ...]:
        return tuple(ids_of(self.tokenizer, self._render(messages, tools)))

    def follow(
        self,
        history: Sequence[Message],
        sampled: SampledTurn,
        observations: Sequence[Message],
        tools: Sequence[Message],
    ) -> tuple[Following, bool]:
        before = self._render(history, tools)
        said_as, probe = as_message(self.form, sampled.text), probe_message(self.form, sampled.text, _PROBE)
        whole = self._render([*history, said_as, *observations], tools)
        probed = self._render([*history, probe, *observations], tools)
        closed = self._render([*history, probe], tools, add_generation_prompt=False)
        _, found, tail = probed.partition(_PROBE)
        _, _, closing = closed.partition(_PROBE)
        if not found:
            raise DataError(Problem("the chat template drops the assistant's text"))
        said = whole[len(before) : len(whole) - len(tail)]
        # Templates add or strip white space around the text; the model has read its own text unchanged.
        # Calls that the template takes as messages only are rendered again, and are kept as sampled.
        as_sampled = "tool_calls" in said_as or (
            whole.endswith(tail) and said.strip() == str(said_as["content"]).strip()
        )
        unchanged = whole.startswith(before) and as_sampled
        kept, lost = tokens_within(self.text_of, sampled)
        ended = sampled.ended and kept == len(sampled.token_ids)
        tail_ids = ids_of(self.tokenizer, tail)
        end = sampled.token_ids[-1] if ended else None
        skipped = self._end_of_turn(tail_ids, ids_of(self.tokenizer, closing), end, skip=ended or not self.close_turns)
        return Following(kept, (*ids_of(self.tokenizer, lost), *tail_ids[skipped:])), unchanged

    def raw_ids(self, prompt: str | tuple[int, ...], *, begins: bool) -> tuple[int, ...]:
        return raw_prompt_ids(self.tokenizer, prompt, begins=begins)

    def images_of(self, messages: Sequence[Message]) -> PromptImages | None:
        return self.images.of(messages)

    def holds_image_token(self, token_ids: Sequence[int]) -> bool:
        reader = self.images.reader
        return reader is not None and self.tokenizer.convert_tokens_to_ids(reader.token) in token_ids

    def text_of(self, token_ids: Sequence[int]) -> str:
        return decoded(self.tokenizer, token_ids, self.form)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        placed = self.images.placed(history_of(self.form, messages))
        text = render(self.tokenizer, placed, self.options, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.images.expanded(text, messages)

    def _end_of_turn(self, tail: Sequence[int], closing: Sequence[int], end: int | None, *, skip: bool) -> int:
        """Count the tail's tokens that end the assistant's turn and are not written, because the model has ended it (with the
        token ``end``, or an equivalent one) or the turn stays open."""
        if not skip:
            return 0
        within = list(tail[: len(closing)])
        if end in within:
            return within.index(end) + 1
        special = special_ids(self.tokenizer)
        return max((place + 1 for place, token in enumerate(within) if token in special), default=0)


@dataclass(frozen=True, slots=True)
class OneMessageTurns:
    """Renders all turns as one message of the assistant: observations are plain text in it, whatever their role. End tokens
    are removed from turns that are followed by another, unless they hold nothing else."""

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any]

    def begin(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[int, ...]:
        placed = TurnImages().placed(messages)
        return tuple(ids_of(self.tokenizer, render(self.tokenizer, placed, self.options, tools=tools)))

    def follow(
        self,
        history: Sequence[Message],
        sampled: SampledTurn,
        observations: Sequence[Message],
        tools: Sequence[Message],
    ) -> tuple[Following, bool]:
        kept, lost = tokens_within(self.text_of, sampled)
        if sampled.ended and kept == len(sampled.token_ids) > 1:
            kept -= 1
        ids = ids_of(self.tokenizer, lost) if lost else []
        for message in TurnImages().placed(observations):
            ids += ids_of(self.tokenizer, content_of(message))
        return Following(kept, tuple(ids)), True

    def raw_ids(self, prompt: str | tuple[int, ...], *, begins: bool) -> tuple[int, ...]:
        return raw_prompt_ids(self.tokenizer, prompt, begins=begins)

    def images_of(self, messages: Sequence[Message]) -> PromptImages | None:
        return None

    def holds_image_token(self, token_ids: Sequence[int]) -> bool:
        return False

    def text_of(self, token_ids: Sequence[int]) -> str:
        return decoded(self.tokenizer, token_ids)


def tokens_within(text_of: Callable[[Sequence[int]], str], sampled: SampledTurn) -> tuple[int, str]:
    """Return the number of the turn's tokens that lie in its text (all of them where it was not cut), and the part of a partly
    cut token's text."""
    if text_of(sampled.token_ids) == sampled.text:
        return len(sampled.token_ids), ""
    for kept in range(len(sampled.token_ids) - 1, -1, -1):
        text = text_of(sampled.token_ids[:kept])
        if sampled.text.startswith(text):
            return kept, sampled.text[len(text) :]
    return 0, sampled.text
