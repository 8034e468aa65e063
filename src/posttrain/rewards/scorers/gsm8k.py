"""GSM8K's "#### 72" (strict), or the last number of the text (flexible), equal to the reference as text."""

from __future__ import annotations

import re
from functools import partial
from typing import Literal

from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.extract import reference_text
from posttrain.rewards.options import check_choice

Method = Literal["strict", "flexible"]
Which = Literal["last", "first"]

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
# The part of a response that verl searches: the last characters.
_TAIL = 300


@REWARDS.register("gsm8k", quick=True)
def gsm8k(
    *, method: Method = "strict", which: Which = "last", score: float = 1.0, format_score: float = 0.0
) -> RewardFn:
    """A reward of ``score`` for the right answer, ``format_score`` for a wrong one, 0 for none; ``pred`` is the answer.

    Args: ``method`` strict reads "#### " and a number, flexible the last number; ``which`` last searches the last 300
        characters and takes the last match (verl), first searches the whole text and takes the first "#### " (SkyRL); the
        flexible number is the last one in both.
    Raises: ConfigError for an unknown method or which.
    """
    check_choice("method", method, Method)
    check_choice("which", which, Which)
    return partial(_score, method=method, which=which, score=score, format_score=format_score)


def _score(
    prompt: Prompt, response: str, *, method: Method, which: Which, score: float, format_score: float
) -> dict[str, object]:
    """Raises: ValueError when the reference is neither a text nor a number."""
    reference = reference_text(prompt.ground_truth, "gsm8k")
    answer = extract(response, method, which)
    if answer is None:
        return {"score": 0.0, "pred": ""}
    return {"score": score if answer == reference else format_score, "pred": answer}


def extract(response: str, method: Method, which: Which) -> str | None:
    """Return the answer as written: a strict one loses its commas but keeps a final full stop ("72." does not equal "72")."""
    text = response[-_TAIL:] if which == "last" else response
    if method == "strict":
        answers = _STRICT.findall(text)
        return str(answers[-1 if which == "last" else 0]).replace(",", "") if answers else None
    numbers = [match for match in _NUMBER.findall(text) if match not in ("", ".")]
    return str(numbers[-1]) if numbers else None
