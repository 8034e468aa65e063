"""The letter that a response chooses in a multiple-choice question: the rule of ROLL's CrossThinkQA worker."""

from __future__ import annotations

from posttrain.rewards.spans import after_think, spans

_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def chosen_letter(response: str) -> tuple[str | None, bool]:
    r"""Return the first capital letter (A to Z) of the answer, None without one, and True when the answer is boxed.

    The answer follows the last </think>: it is the last \boxed{…} that is not empty (up to its first closing brace); without
    one, the text after the last "answer is"; without that, the whole text.
    """
    text = after_think(response)
    boxes = [box for box in spans(text, "\\boxed{", "}") if box]
    answer = boxes[-1] if boxes else text.rpartition("answer is")[2]
    return next((character for character in answer if character in _LETTERS), None), bool(boxes)


def wanted_letter(truth: object) -> str:
    """Return the first character of the reference, which must be a capital letter.

    Raises: ValueError.
    """
    if not isinstance(truth, str) or not truth.strip() or truth.strip()[0] not in _LETTERS:
        raise ValueError(f"the ground truth is {truth!r}; a capital letter is expected")
    return truth.strip()[0]
