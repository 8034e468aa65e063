"""DAPO's rule (arXiv:2503.14476): the last "Answer: …" line, +1 or -1, compared after the normalisation of Minerva."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.extract import reference_text
from posttrain.rewards.spans import last_boxed

INVALID = "[INVALID]"  # the answer of a response without one
# The parts of a response that are searched, in characters.
_TAIL = 300
_BOX_TAIL = 100

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_ANSWER_BEFORE_TAG = re.compile(r"answer\s*:\s*([^\n<]+)", re.IGNORECASE)

# Lewkowycz et al., arXiv:2206.14858, appendix D: replacements in order, then removals in order.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *(
        "childrentickets",
        "multiples",
        "\\text{s}",
        "\\text{.}",
        "\\text{\ns}",
        "\\text{}^2",
        "\\text{}^3",
        "\\text{\n}",
    ),
    *("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_DOLLARS = re.compile(r"[^\n]*?\$([^\n$]*)\$[^\n]*")
_WRAPPERS = re.compile(r"\\(?:text|textbf|overline)\{([^{}]*)\}")
_FRAC = re.compile(r"(frac)([^{])(.)")
_SQRT = re.compile(r"(sqrt)([^{])")


@REWARDS.register("math_dapo", quick=True)
def math_dapo(*, strict_box: bool = False, box_fallback: bool = True, stop_at_tag: bool = False) -> RewardFn:
    r"""A reward of 1 or -1, with ``acc`` (correct or not) and ``pred`` (the answer).

    Args: ``strict_box`` compares the last \boxed{…} of the last 100 characters with the reference, both verbatim, and
        ignores the rest; ``box_fallback`` does so when there is no "Answer:"; ``stop_at_tag`` also ends the answer at a
        "<". SkyRL's aime is box_fallback false, stop_at_tag true.
    """
    return partial(_score, strict_box=strict_box, box_fallback=box_fallback, stop_at_tag=stop_at_tag)


def _score(
    prompt: Prompt, response: str, *, strict_box: bool, box_fallback: bool, stop_at_tag: bool
) -> Mapping[str, object]:
    """Raises: ValueError when the reference is neither a text nor a number."""
    reference = reference_text(prompt.ground_truth, "math_dapo")
    tail = response[-_TAIL:]
    answers = [] if strict_box else (_ANSWER_BEFORE_TAG if stop_at_tag else _ANSWER).findall(tail)
    if answers:
        answer = normalize(answers[-1])
        right = answer == normalize(reference)
    else:
        box = last_boxed(tail[-_BOX_TAIL:]) if strict_box or box_fallback else None
        answer = INVALID if box is None else box
        right = box == reference
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer}


def normalize(answer: str) -> str:
    r"""Apply the rules in order: keep the text after the last "="; replace and remove as listed above; of "… $x$ …" keep x;
    unwrap \text, \textbf, \overline and \boxed; add braces to frac12 and sqrt3; remove dollar signs; remove commas when all
    else is digits; strip blanks."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for word in _REMOVED:
        text = text.replace(word, "")
    text = _DOLLARS.sub(r"$\1$", text)
    text = _WRAPPERS.sub(r"\1", text)
    text = _unboxed(text)
    text = _SQRT.sub(r"\1{\2}", _FRAC.sub(r"\1{\2}{\3}", text)).replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()


def _unboxed(text: str) -> str:
    start, end = text.find("\\boxed{"), text.rfind("}")
    return text if start < 0 or end < start else text[:start] + text[start + len("\\boxed{") : end] + text[end + 1 :]
