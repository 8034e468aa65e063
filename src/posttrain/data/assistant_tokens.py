"""Which tokens of a conversation the assistant wrote: the ones that supervised fine-tuning learns.

A chat template is a program that turns messages into text and does not say which part of the text is whose. Two ways to
find out, both exact:

1. A template with ``{% generation %}`` markers says it itself.
2. Of any other, prefixes are rendered: the text of the messages before an answer, with the generation prompt, must be the
   beginning of the whole text, and the text with the answer must go on from there. What lies between is what the model has
   to write when it is asked at that point. A template that writes earlier text differently once a later message is there
   (some drop the reasoning of earlier turns) fails this check, and the conversation is refused rather than masked wrongly.

An answer is learned up to and with the first token that ends it (``<|im_end|>``); what a template writes behind that, such
as a line break, nobody ever has to write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from posttrain.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # characters of a text, the end excluded
Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]  # [n] ids, and whether each one is learned

MARKERS = re.compile(r"{%-?\s*generation\s*-?%}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A tokenizer's chat template with what it is given besides messages."""

    tokenizer: PreTrainedTokenizerBase
    variables: Mapping[str, Any]
    tools: Sequence[Any] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], *, ask: bool = False) -> str:
        """The text of these messages; with ``ask`` up to where the assistant's answer begins.

        Raises: DataError when the template refuses them.
        """
        text = self._apply(messages, tokenize=False, add_generation_prompt=ask)
        assert isinstance(text, str)  # one conversation gives one text
        return text

    def marked_tokens(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """Tokens and learned ones by the template's own markers. Raises: DataError."""
        found = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return np.array(found["input_ids"], np.int32), np.array(found["assistant_masks"], np.bool_)

    def _apply(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(self.tools) if self.tools else None,
                **{**self.variables, **how},
            )
        except Exception as error:  # a template is a program from the model's folder: it may fail in any way
            what = f"the chat template refuses it: {type(error).__name__}: {error}"
            raise DataError(Problem(what)) from error


def conversation_tokens(template: Template, messages: Sequence[Mapping[str, Any]], *, last_only: bool) -> Tokens:
    """Token ids of a conversation, and which of them are learned: those of every assistant message, or of the last one.

    Raises: DataError when the template refuses the messages, or does not show where an answer begins and ends.
    """
    if MARKERS.search(template.tokenizer.chat_template or ""):
        ids, learned = template.marked_tokens(messages)
        return ids, _last_run(learned) if last_only else learned
    text, spans = answer_spans(template, messages, last_only=last_only)
    return tokens_of_spans(template.tokenizer, text, spans)


def answer_spans(
    template: Template, messages: Sequence[Mapping[str, Any]], *, last_only: bool = False
) -> tuple[str, list[Span]]:
    """The text of a conversation and where in it answers stand, from their first character behind the generation prompt to
    the end of the token that ends them. Raises: DataError."""
    whole = template.render(messages)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    end_marks = sorted(filter(None, template.tokenizer.all_special_tokens), key=len, reverse=True)
    mark = "|".join(map(re.escape, end_marks)) or "(?!)"  # which matches nothing
    closing = re.compile(rf"(\s*(?:{mark}))+\s*\Z")
    spans = []
    for index in answers[-1:] if last_only else answers:
        if index == 0:
            raise DataError(Problem("begins with an answer, and nothing asks for it"))
        asked = template.render(messages[:index], ask=True)
        if not whole.startswith(asked):
            raise DataError(_not_append_only(index, len(answers)))
        answered = whole if index == len(messages) - 1 else template.render(messages[: index + 1])
        end = _common_length(answered, whole, re.compile(mark))
        # What the template puts behind the last message only (an end of text) may be missing in the whole.
        behind = answered[end:]
        if end <= len(asked) or (behind.strip() and not closing.fullmatch(behind)):
            raise DataError(_not_append_only(index, len(answers)))
        spans.append((len(asked), len(asked) + _end_of_answer(whole[len(asked) : end], closing, mark)))
    return whole, spans


def _common_length(one: str, other: str, mark: re.Pattern[str]) -> int:
    """How many characters two texts begin with alike, special tokens counted whole."""
    if other.startswith(one):
        return len(one)
    end = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
    inside = (found.start() for found in mark.finditer(one) if found.start() < end < found.end())
    return next(inside, end)


def _end_of_answer(text: str, closing: re.Pattern[str], mark: str) -> int:
    """How much of a text that begins with an answer is the answer and the token that ends it."""
    found = closing.search(text)
    if found is None:  # a template without such tokens ends an answer with what it writes behind it
        return len(text)
    first = re.compile(rf"\s*(?:{mark})").match(text, found.start())
    assert first is not None, "closing begins with a mark"
    return first.end()


def tokens_of_spans(tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span]) -> Tokens:
    """Tokens of a text, of which those in spans are learned. No token is partly in one.

    The text is tokenised as a whole where that puts token borders on all borders of spans, and makes of the text before the
    first span what it makes of it alone (which is what the model is given when it is asked); else piece by piece.
    """
    borders = [border for span in spans for border in span]
    if tokenizer.is_fast:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = found["input_ids"], found["offset_mapping"]
        asked = tokenizer(text[: borders[0]], add_special_tokens=False, verbose=False)["input_ids"]
        clean = not any(start < border < end for border in borders for start, end in offsets)
        if clean and ids[: len(asked)] == asked:
            learned = [any(first <= start < last for first, last in spans) for start, _ in offsets]
            return np.array(ids, np.int32), np.array(learned, np.bool_)
    pieces: list[list[int]] = []
    cuts = [0, *borders, len(text)]
    for start, end in pairwise(cuts):
        piece = text[start:end]
        pieces.append(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"] if piece else [])
    learned = [bool(place % 2) for place, piece in enumerate(pieces) for _ in piece]
    return np.array([token for piece in pieces for token in piece], np.int32), np.array(learned, np.bool_)


def _last_run(learned: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Only the last uninterrupted run of learned tokens."""
    places = np.flatnonzero(learned)
    if len(places) == 0:
        return learned
    gaps = np.flatnonzero(np.diff(places) > 1)
    first = places[gaps[-1] + 1] if len(gaps) else places[0]
    only = np.zeros_like(learned)
    only[first : places[-1] + 1] = True
    return only


def _not_append_only(index: int, answers: int) -> Problem:
    what = (
        f"the chat template writes the text up to message {index} differently when the rest of the conversation is there, so "
        "it does not show which tokens the assistant wrote"
    )
    fix = "use a template with {% generation %} markers (model.chat_template_file)"
    if answers > 1:
        fix += ", or learn only the last answers with data.train_on=last_turn"
    return Problem(what, fix=fix)
