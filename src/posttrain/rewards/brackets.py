r"""The brackets of a mathematical answer: one character for each, the pair around the whole, the parts inside.

The braces of a set, \{ and \}, become ⦃ and ⦄, which no brace of LaTeX is; \cup becomes a sign too; ]0,1[ becomes (0,1).
"""

from __future__ import annotations

import re
from collections.abc import Callable

OPENS, CLOSES = "([{⦃⟨", ")]}⦄⟩"
UNION = "\u222a"
_LIST = ("", "{}", "⦃⦄")  # a list of values without brackets is the set of these values
_MOST_UNITED = 8  # parts of a union: they are compared in any order

_SIZE = re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\.?")
_COMMANDS = {
    **{rf"\{side}{name}": character for name, pair in (("brack", "[]"), ("paren", "()"), ("brace", "⦃⦄"), ("angle", "⟨⟩"))
       for side, character in zip("lr", pair, strict=True)},
    "\\{": "⦃",
    "\\}": "⦄",
    "\\cup": UNION,
    "\\bigcup": UNION,
}  # fmt: skip
_COMMAND = re.compile("|".join(re.escape(each) + "(?![A-Za-z])" * each[-1].isalpha() for each in _COMMANDS))
_LETTER_UNION = re.compile(r"(?<=[)\]⦄])\s*U\s*(?=[(\[⦃\]])")
# An interval with at least one bracket that points outwards: ]0,1[ or [0,1[. Parentheses inside are balanced.
_OUTWARDS = re.compile(
    r"(?P<opening>(?:^|(?<=[,\u222a=⦃(])|(?<=\\in))[\[\]])(?P<inside>(?:[^\[\]()]|\([^()]*\))+)(?P<closing>[\[\]])(?=$|[,\u222a⦄)])"
)


def plain_brackets(text: str) -> str:
    r"""Write \left, \lbrack, \{, \langle, \cup and their like as single characters."""
    text = _COMMAND.sub(lambda found: _COMMANDS[found[0]], _SIZE.sub("", text))
    return _LETTER_UNION.sub(UNION, text)


def inward_brackets(text: str) -> str:
    """Write ]0,1[ as (0,1), and [0,1[ as [0,1). The text holds no blanks."""
    return _OUTWARDS.sub(_inwards, text)


def _inwards(found: re.Match[str]) -> str:
    opening = "(" if found["opening"] == "]" else "["
    closing = ")" if found["closing"] == "[" else "]"
    return f"{opening}{found['inside']}{closing}"


def enclosing(text: str) -> str:
    """The pair of brackets around the whole of a text, such as "[)" around [1,2); empty when there is none."""
    if len(text) < 2 or text[0] not in OPENS or text[-1] not in CLOSES:
        return ""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in OPENS) - (character in CLOSES)
        if depth == 0:
            return text[0] + text[-1] if position == len(text) - 1 else ""
    return ""


def elements(text: str) -> list[str]:
    """The parts between commas that stand in no bracket, once a pair around the whole is gone: (1,2) has two.

    A single part keeps its pair, unless it is that of a set.
    """
    pair = enclosing(text)
    if not pair:
        return split(text, ",")
    inside = split(text[1:-1], ",")
    return inside if len(inside) > 1 or pair == "⦃⦄" else [text]


def split(text: str, separator: str) -> list[str]:
    """The parts between separators that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in OPENS:
            depth += 1
        elif character in CLOSES:
            depth -= 1
        elif character == separator and depth <= 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def same_parts(answer: str, reference: str, same: Callable[[str, str], bool]) -> bool | None:
    """Compare two unions in any order, or two lists in theirs, with the same pair of brackets around both.

    Braces of a set are like no brackets. None when both texts are single expressions.
    """
    united = split(answer, UNION), split(reference, UNION)
    if max(map(len, united)) > 1:
        return len(united[0]) == len(united[1]) <= _MOST_UNITED and _same_in_any_order(*united, same)
    lists = elements(answer), elements(reference)
    if max(map(len, lists)) == 1:
        return None
    kinds = ["" if pair in _LIST else pair for pair in map(enclosing, (answer, reference))]
    return kinds[0] == kinds[1] and len(lists[0]) == len(lists[1]) and all(map(same, *lists))


def _same_in_any_order(answers: list[str], references: list[str], same: Callable[[str, str], bool]) -> bool:
    left = list(references)
    for answer in answers:
        found = next((place for place, reference in enumerate(left) if same(answer, reference)), None)
        if found is None:
            return False
        del left[found]
    return True
