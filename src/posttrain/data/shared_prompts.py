"""Prompts without a column: both sides of a pair begin with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.cells import BadCell, Message
from posttrain.data.record_files import Record

Completion = list[Message]


def apart(sides: list[Completion]) -> tuple[list[Message], list[Completion]]:
    """Split conversations into the messages that all of them begin with, and the rest: of one alone, its last turn.

    Raises: BadCell for sides that begin differently.
    """
    if len(sides) == 1:
        return sides[0][:-1], [sides[0][-1:]]
    shared = 0
    for mine, theirs in zip(*sides, strict=False):
        if mine != theirs:
            break
        shared += 1
    if not shared:
        raise BadCell("begins with other messages than the chosen side; both sides answer one prompt")
    return sides[0][:shared], [side[shared:] for side in sides]


def texts_apart(sides: Sequence[Completion]) -> tuple[list[Message], list[Completion]]:
    """Split two texts, each the only message of a side, into the words that both begin with, and the rest.

    Source: the implicit prompts of TRL, "The sky is blue." and "The sky is green."; here they end between words, where there is
    a blank. Raises: BadCell for conversations, and where nothing is shared or nothing else is said.
    """
    texts = [side[0].get("content") for side in sides if len(side) == 1]
    begin = shared_words(texts) if len(texts) == len(sides) else ""
    if not begin:
        raise BadCell("begins with other words than the chosen side, and there is no column with the prompt")
    rests = [str(text)[len(begin) :].strip() for text in texts]
    if not all(rests):
        raise BadCell("or the chosen side holds only the words that both begin with, which are the prompt")
    return [{"role": "user", "content": begin}], [[{"role": "assistant", "content": rest}] for rest in rests]


def prompt_in_texts(record: Record, chosen: str | None, rejected: str | None) -> bool:
    """True where two texts begin with the same words and no other column may hold the prompt: a text, list or mapping."""
    others = (value for name, value in record.items() if name not in (chosen, rejected))
    if any(isinstance(value, (str, list, Mapping)) for value in others):
        return False
    return bool(shared_words([record.get(chosen or ""), record.get(rejected or "")]))


def shared_words(texts: Sequence[Any]) -> str:
    """Return the words that two texts begin with; a part of a word where no blank divides them; "" for other values."""
    first, second = texts
    if not isinstance(first, str) or not isinstance(second, str):
        return ""
    length = next((place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), None)
    begin = first[: min(len(first), len(second)) if length is None else length]
    blank = max(begin.rfind(sign) for sign in " \n\t")
    return begin[: max(blank, 0)].rstrip() or begin.rstrip()
