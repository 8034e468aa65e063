r"""Equality of two LaTeX answers as text: the normalisation of the MATH benchmark (Hendrycks et al., arXiv:2103.03874).

Nothing is calculated: \frac12 equals \frac{1}{2}, and 0.5 equals \frac{1}{2}, but 0.50 does not equal 0.5.
"""

from __future__ import annotations

import re

# Replaced in this order, each everywhere.
_REPLACED = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
_INTEGER_FRACTION = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")


def same_latex(one: str, other: str) -> bool:
    """Return True when two answers are equal after normalisation."""
    return normalize_latex(one) == normalize_latex(other)


def normalize_latex(text: str) -> str:
    r"""Apply the rules in order: line breaks and \! go; \\ becomes \; tfrac and dfrac become frac; \left, \right, degree signs
    and \$ go; the text after "\text{ " (a unit) goes; \% goes; a decimal point gets a 0 before it at the start, after a
    blank or a brace; "k = 3" with at most two characters on the left keeps 3; \sqrt3 becomes \sqrt{3}; blanks go; \frac12
    becomes \frac{1}{2}; 0.5 becomes \frac{1}{2}; a/b of integers becomes \frac{a}{b}.
    """
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text = text.partition("\\text{ ")[0]
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = f"0{text}"
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = _with_braces_after_sqrt(text).replace(" ", "")
    text = with_braces_after_frac(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    if fraction := _INTEGER_FRACTION.fullmatch(text):
        return f"\\frac{{{fraction[1]}}}{{{fraction[2]}}}"
    return text


def with_braces_after_frac(text: str) -> str:
    r"""Write \frac12 as \frac{1}{2}, \frac1{72} as \frac{1}{72}. A \frac before fewer than two characters changes nothing."""
    head, *rest = text.split("\\frac")
    parts = [head]
    for after in rest:
        if after.startswith("{"):
            parts.append(after)
        elif len(after) < 2:
            return text
        elif after[1] == "{":
            parts.append(f"{{{after[0]}}}{after[1:]}")
        else:
            parts.append(f"{{{after[0]}}}{{{after[1]}}}{after[2:]}")
    return "\\frac".join(parts)


def _with_braces_after_sqrt(text: str) -> str:
    head, *rest = text.split("\\sqrt")
    return "\\sqrt".join(
        [head, *(f"{{{after[0]}}}{after[1:]}" if after[:1] not in ("", "{") else after for after in rest)]
    )
