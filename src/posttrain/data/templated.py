"""Detection of prompts that are templated already: the text of a message holds the markers of a chat template.

The chat template would wrap such a text a second time, and the model would read markers inside the user's turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.data.readers import MAX_LISTED
from posttrain.errors import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BAR = "\uff5c"  # the wide bar of DeepSeek's tokens
# The beginning of a turn in the templates of well-known families of models.
_TURNS = {
    "ChatML": r"<\|im_start\|>\s*\w+",
    "Llama 3": r"<\|start_header_id\|>\s*\w+\s*<\|end_header_id\|>",
    "Llama 4": r"<\|header_start\|>\s*\w+\s*<\|header_end\|>",
    "Llama 2 and Mistral": r"\[/?INST\]",
    "Gemma": r"<start_of_turn>\s*\w+",
    "DeepSeek": rf"<{_BAR}(?:User|Assistant){_BAR}>",
    "Phi, Zephyr and GLM": r"<\|(?:[Uu]ser|[Aa]ssistant|[Ss]ystem)\|>",
    "Granite": r"<\|start_of_role\|>\s*\w+",
    "Command R": r"<\|START_OF_TURN_TOKEN\|>",
    "gpt-oss": r"<\|start\|>(?:system|developer|user|assistant)",
    "Kimi": r"<\|im_(?:user|assistant|system)\|>",
    "EXAONE": r"\[\|(?:user|assistant|system)\|\]",
}
_TURN = re.compile("|".join(f"({pattern})" for pattern in _TURNS.values()))
# A text may begin with whitespace and a begin-of-sequence token.
_BEFORE_THE_FIRST_TURN = re.compile(
    rf"\s*(?:<s>|<bos>|<\|begin_of_text\|>|<{_BAR}begin▁of▁sentence{_BAR}>|\[gMASK\]<sop>)?\s*"
)
# A word of markers, as opposed to plain words such as "User:", which prompts use by themselves.
_MARKED = re.compile(rf"[<\[|{_BAR}{{\]>]")
_SHORTEST_MARKER = 4
_SHOWN = 40  # characters

RAW = "raw"  # data.templated_prompts: texts are tokenised as they are
Markers = Sequence[str]


def own_markers(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> list[str]:
    """Return the text that the tokenizer's chat template writes between a user's and an assistant's message, and between the
    answer and the next question; those that are no markers (plain words) are left out. Empty for a template that refuses such
    a conversation."""
    first, answer, second = "Xquestion1X", "Xanswer1X", "Xquestion2X"
    roles = ((first, "user"), (answer, "assistant"), (second, "user"))
    try:
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for content, role in roles], tokenize=False, **options
        )
    except Exception:  # noqa: BLE001 - a template is a program from the model's folder; load_prompts reports its faults
        return []
    if not isinstance(text, str):
        return []
    between = re.search(f"{first}(.*){answer}(.*){second}", text, re.DOTALL)
    found = [] if between is None else [each.strip() for each in between.groups()]
    return [each for each in found if len(each) >= _SHORTEST_MARKER and _MARKED.search(each)]


def marker_in(messages: Sequence[Mapping[str, Any]], own: Markers = ()) -> str:
    """Return the marker of a chat template that shows a conversation's text to be templated already; "" where there is none.

    It is one of ``own``, or a turn of a well-known family that opens the text or is not the only one in it: a question that
    mentions a marker is not templated.
    """
    for text in texts_of(messages):
        for marker in own:
            if marker in text:
                return marker
        found = _TURN.search(text)
        if found and (found.start() == _start(text) or _TURN.search(text, found.end())):
            return found[0]
    return ""


def templated_problem(found: Sequence[tuple[str, str]], rows: int, what: str, field: str) -> Problem:
    """Describe prompts that are templated already.

    Args: ``found`` holds (name of the row, marker); ``rows``, how many were looked at; ``what``, what they are called.
    """
    first = ", ".join(f"{name} has {_one_line(marker)}" for name, marker in found[:MAX_LISTED])
    more = f", … {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return Problem(
        f"{len(found)} of {rows} {what} are templated already, and the chat template would wrap them again: {first}{more}",
        fix="take the markers out of the text, or tokenize it as it is with data.templated_prompts=raw "
        "(wrap applies the template all the same)",
        field=field,
    )


def texts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of messages, and of their parts."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


def _start(text: str) -> int:
    before = _BEFORE_THE_FIRST_TURN.match(text)
    return before.end() if before else 0


def _one_line(marker: str) -> str:
    text = repr(marker)[1:-1]
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
