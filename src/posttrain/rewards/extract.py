"""Extraction of the answer from a response, and comparison of two answers as text. Nothing is evaluated."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from posttrain.rewards.options import check_choice

Extract = Literal["last_number", "tag", "last_line", "all"]

# Digits, plain or in groups of three with commas, with or without decimals, without an exponent.
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"[-+\u2212]?(?:{_UNSIGNED})")
# In running text a number does not begin inside a word or another number: the 3 of "5-3" has no sign, x2 has no number.
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.]){_NUMBER.pattern}")
# Neither tag may occur inside, so that the innermost pair matches. Linear in the length of the text.
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def check_extract(extract: str) -> None:
    """Raises: ConfigError for an unknown extraction method."""
    check_choice("extract", extract, Extract)


def extract_answer(response: str, extract: Extract) -> str | None:
    """Return the answer of a response, without surrounding whitespace; None when there is none.

    last_number: the last number in the text, as ``number`` reads it; tag: the content of the last <answer>…</answer>;
    last_line: the last line that is not blank; all: the whole response, unless it is blank.
    """
    if extract == "last_number":
        numbers = [match.group() for match in _NUMBER_IN_TEXT.finditer(response)]
        return numbers[-1] if numbers else None
    if extract == "tag":
        tagged = _TAGGED.findall(response)
        return tagged[-1].strip() if tagged else None
    text = response.strip()
    if not text:
        return None
    return text if extract == "all" else text.splitlines()[-1].strip()


def number(text: str) -> Decimal | None:
    """Parse a text that is a number; None for anything else.

    A sign (+, -, or the minus sign U+2212), digits, a decimal point; commas only between groups of three digits
    (1,234.5). No exponent, no unit, no currency, no fraction.
    """
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", "").replace("\u2212", "-"))


def same_answer(answer: str, reference: str) -> bool:
    """Equal as stripped text, or equal as numbers: 12.0 equals 12, 1,234 equals 1234."""
    if answer.strip() == reference.strip():
        return True
    value, expected = number(answer), number(reference)
    return value is not None and value == expected


def reference_text(truth: object, needed_by: str) -> str:
    """Return a reference answer as text.

    Raises: ValueError when it is neither a text nor a number, or is blank: no response could ever match it.
    """
    if isinstance(truth, float):
        truth = format(Decimal(repr(truth)), "f")  # 1e+16 written out
    if not isinstance(truth, (str, int)) or not str(truth).strip():
        raise ValueError(f"the ground truth is {truth!r}; {needed_by} needs a text or a number")
    return str(truth)
