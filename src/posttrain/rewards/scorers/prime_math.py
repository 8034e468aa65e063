r"""PRIME's rule for mathematics (arXiv:2502.01456): the answer in words or in a box, equal in form or in value."""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase

from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.equivalence import same_by_form, same_by_value
from posttrain.rewards.extract import reference_text
from posttrain.rewards.spans import last_boxed

_BEFORE = ("answer:", "answer is", "answers are")  # the answer follows
# The answer precedes these words.
_BEHIND = ("is answer", "is the answer", "are answers", "are the answers")
_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)
_LAST_WORDS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")


@REWARDS.register("prime_math", quick=True)
def prime_math() -> RewardFn:
    """A reward of 1 for the right answer, else 0; ``pred`` is the answer, as text."""
    return _score


def _score(prompt: Prompt, response: str) -> dict[str, object]:
    """Raises: ValueError when the reference is neither a text nor a number."""
    reference = reference_text(prompt.ground_truth, "prime_math")
    reference = _boxed(reference) or reference  # some datasets give the solution's box
    answer = extract(response)
    right = same_by_form(answer, reference) or same_by_value(answer, reference)
    return {"score": float(right), "pred": answer}


def extract(response: str) -> str:
    r"""Narrow a response to its answer: the text after the last "answer:", "answer is" or "answers are"; in it, the text before
    the last "is the answer" or the like; in it, the last \boxed{…}, or else \fbox{…}; then the text before its last ". "; then
    the text after the last "be ", "is ", "are ", "=", ": " or "get ". Each rule applies where its words occur."""
    text = response
    for words in _BEFORE:
        text = _after(text, words)
    for words in _BEHIND:
        place = _last(text, words)
        text = text if place < 0 else text[:place].strip()
    box = _boxed(text)
    text = text if box is None else box
    text = text.rpartition(". ")[0] or text
    for words in _LAST_WORDS:
        text = _after(text, words)
    return text.strip().rstrip(".")


def _boxed(text: str) -> str | None:
    box = last_boxed(text)
    return last_boxed(text, command=r"\fbox") if box is None else box


def _after(text: str, words: str) -> str:
    """Return the text after the last ``words``, ignoring case; the whole text when they do not occur."""
    place = _last(text, words)
    return text if place < 0 else text[place + len(words) :].strip()


def _last(text: str, words: str) -> int:
    """Return the place of the last ``words`` in a text, ignoring case; -1 when they do not occur.

    Only A to Z are lowered: ``str.lower`` makes two characters of one İ, and every later place would be off by one.
    """
    return text.translate(_LOWER).rfind(words)
