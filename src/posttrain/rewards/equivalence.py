r"""Equality of two answers to a mathematical question: the two rules of PRIME's reward.

``same_by_form`` follows the grader of PRM800K (Lightman et al., arXiv:2305.20050), ``same_by_value`` that of ToRA
(Gou et al., arXiv:2309.17452). Both evaluate with ``posttrain.rewards.expression`` and never run an answer as a program:
two expressions with variables are equal when they agree at fixed points of the complex plane, so no answer can make the
comparison slow.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import partial
from math import isinf

from posttrain.rewards.brackets import elements, enclosing, inward_brackets, plain_brackets, same_parts
from posttrain.rewards.expression import MAX_LENGTH, PI, Expression, NoValue, close
from posttrain.rewards.latex_text import normalize_latex, same_latex, with_braces_after_frac

_LETTERS = tuple(enumerate("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))
# Points at which expressions with variables are compared: no two variables have related values.
_POINTS = tuple(
    {letter: complex((-1) ** k * (0.31 + 0.023 * i + 0.13 * k), 0.47 - 0.017 * i + 0.29 * k) for i, letter in _LETTERS}
    for k in range(3)
)
_EXACT = 1e-9  # relative rounding error allowed in an exact equality
_MAX_LETTERS = 2  # with more unknown letters the text is taken for words, not variables

_UNITS = (
    *("degree", "centimeter", "cm", "millimeter", "mm", "kilometer", "km", "meter", "mile", "second", "minute", "hour"),
    *("day", "week", "month", "year", "feet", "foot", "inch", "yard", "unit", "dollar", "cent"),
)
_UNIT = re.compile(rf"(?<![A-Za-z\\])(?:{'|'.join(_UNITS)})(?:es|s)?(?![A-Za-z])(?: ?\^ ?\{{?[0-9]\}}?)?")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_DROPPED = (
    "\\!",
    "\\$",
    "\\%",
    "$",
    "%",
    "^{\\circ}",
    "^\\circ",
    "°",
    "\\,",
    "\\:",
    "\\;",
    "\\ ",
    "~",
    "{,}",
)
# Between brackets, 1,234 is a pair of numbers.
_PAIR = re.compile(r"(?<=[(\[\]⦃])(\s*-?[0-9]{1,3}),([1-9][0-9]{2}\s*)(?=[)\]\[⦄])")
_PLUS = re.compile(r"(?<=[(\[⦃,])\+")
_MIXED = re.compile(r"([0-9]) +([0-9]+/[0-9]+)")
_AND_OR = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{\s*(?:and|or)\s*\}")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}")
_INTEGER = re.compile(r"-?[0-9]+(?:\.0*)?")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_FRACTION = re.compile(r"-?[0-9]+/0*[1-9][0-9]*|-?\\frac\{-?[0-9]+\}\{-?[0-9]+\}")


def same_by_form(answer: str, reference: str) -> bool:
    """Compare two answers after normalisation, else element by element inside the same brackets.

    Fractions are equal as texts, a whole number equals whole numbers only, other expressions are equal by value (relative 1e-9).
    """
    answer, reference = _AND_OR.sub(",", answer), _AND_OR.sub(",", reference)
    if answer.strip() and same_latex(answer, reference):
        return True
    answer, reference = normalize(answer), normalize(reference)
    return bool(answer) and _same_form(answer, reference)


def _same_form(answer: str, reference: str) -> bool:
    parts = same_parts(answer, reference, _same_form)
    if parts is not None:
        return parts
    return _same_element(elements(answer)[0], elements(reference)[0])


def _same_element(answer: str, reference: str) -> bool:
    if answer == reference:
        return bool(answer)
    if _FRACTION.fullmatch(answer) and _FRACTION.fullmatch(reference):
        return normalize_latex(answer) == normalize_latex(reference)
    whole = [_INTEGER.fullmatch(each) is not None for each in (answer, reference)]
    if all(whole):
        return Decimal(answer) == Decimal(reference)
    return not any(whole) and _agree(answer, reference, PI, _EXACT)


def same_by_value(answer: str, reference: str) -> bool:
    """Equal as texts; as numbers within a relative 1e-4, also times or divided by 100 (per cent); tuples and matrices
    element by element; equations when their sides differ by the same; expressions by value, relative 1e-4 (1e-9 with
    variables). π counts as itself and as 3.14."""
    answer, reference = answer.strip(), reference.strip()
    if answer.lower() == reference.lower():
        return bool(answer)
    return any(_same_value(answer, reference, pi) for pi in (PI, 3.14))


def _same_value(answer: str, reference: str, pi: float) -> bool:
    matrices = _matrix(answer), _matrix(reference)
    if matrices[0] is not None and matrices[1] is not None:
        return _same_all(matrices[0], matrices[1], pi)
    answer, reference = normalize(answer), normalize(reference)
    if not answer or not reference:
        return False
    if answer == reference:
        return True
    parts = same_parts(answer, reference, partial(_same_value, pi=pi))
    if parts is not None:
        return parts
    answer, reference = elements(answer)[0], elements(reference)[0]
    if _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(reference):
        value, wanted = float(answer), float(reference)
        if isinf(value) or isinf(wanted):  # hundreds of digits
            return Decimal(answer) == Decimal(reference)
        return any(close(value, each, 1e-4) for each in (wanted, wanted / 100, wanted * 100))
    sides = answer.split("="), reference.split("=")
    if len(sides[0]) == len(sides[1]) == 2:
        differences = ["({})-({})".format(*each) for each in sides]
        return _agree(differences[0], differences[1], pi, 1e-4) or _agree(
            f"-({differences[0]})", differences[1], pi, 1e-4
        )
    for mine, other in (sides, sides[::-1]):
        if len(mine) == 2 and len(other) == 1 and len(mine[0]) <= 2:
            return _same_value(mine[1], other[0], pi)
    return _agree(answer, reference, pi, 1e-4)


def _same_all(answers: list[str], references: list[str], pi: float) -> bool:
    return len(answers) == len(references) and all(
        _same_value(one, other, pi) for one, other in zip(answers, references, strict=True)
    )


def normalize(answer: str) -> str:
    r"""Remove from an answer all that does not matter to its value.

    That is dollar and per cent signs, degrees, units, \text{…} around words, commas between thousands, blanks, \left and
    \right. "and" and "or" between answers become commas, 1 1/2 becomes 1+1/2, brackets are written as in
    ``posttrain.rewards.brackets``; lower case, but for commands. A text of more than MAX_LENGTH characters is only stripped.
    """
    if len(answer) > MAX_LENGTH:
        return answer.strip()
    text = plain_brackets(_TEXT.sub(r"\1", answer).replace(" or ", ",").replace(" and ", ","))
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    text = _MIXED.sub(r"\1+\2", _THOUSANDS.sub("", _PAIR.sub(r"\1, \2", _UNIT.sub("", text))))
    text = with_braces_after_frac("".join(text.split()).rstrip(".").replace("dfrac", "frac").replace("tfrac", "frac"))
    text = _PLUS.sub("", inward_brackets(text))
    while enclosing(text) == "{}":
        text = text[1:-1]
    return text if "\\" in text else text.lower()


def _matrix(text: str) -> list[str] | None:
    """Return the cells of a matrix, row by row, with the number of cells after each row; None for other texts."""
    text = text.replace("$", "").strip()
    for kind in ("matrix", "pmatrix", "bmatrix"):
        begin, end = f"\\begin{{{kind}}}", f"\\end{{{kind}}}"
        if text.startswith(begin) and text.endswith(end) and len(text) <= MAX_LENGTH:
            rows = [row.split("&") for row in text[len(begin) : -len(end)].split("\\\\") if row.strip()]
            return [cell for row in rows for cell in (*row, str(len(row)))]
    return None


def _agree(one: str, other: str, pi: float, relative: float) -> bool:
    """Return True when two expressions have the same value for all values of their variables."""
    try:
        first, second = Expression(one), Expression(other)
    except NoValue:
        return False
    letters = first.variables | second.variables
    if len(letters) > _MAX_LETTERS:
        return False
    tolerance = _EXACT if letters else relative
    points = _POINTS if letters else _POINTS[:1]
    try:
        return all(
            close(first.at(values), second.at(values), tolerance)
            for values in ({**p, "π": complex(pi)} for p in points)
        )
    except NoValue:
        return False
