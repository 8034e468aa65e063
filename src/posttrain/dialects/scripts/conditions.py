"""Conditions of a script: ``[ ... ]``, ``[[ ... ]]``, ``test`` and ``(( ... ))``."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from posttrain.dialects.scripts.arithmetic import computed
from posttrain.dialects.scripts.expansion import pattern_of, source, text_of
from posttrain.dialects.scripts.state import Node, Shell, Value

Truth = bool | None  # None: it cannot be known without running something


def holds(shell: Shell, node: Node) -> Truth:
    """Evaluate the expression inside a test command."""
    kind = node.type
    children = node.children
    if kind == "parenthesized_expression":
        return holds(shell, node.named_children[0])
    if kind == "negated_command" or (kind == "unary_expression" and source(children[0]) == "!"):
        inner = holds(shell, children[-1])
        return None if inner is None else not inner
    if kind == "unary_expression":
        return unary(shell, source(children[0]), text_of(shell, children[-1]), source(children[-1]))
    if kind == "binary_expression" and len(children) == 3:
        left, sign, right = children[0], source(children[1]), children[2]
        if sign in ("&&", "-a"):
            first = holds(shell, left)
            return False if first is False else _both(first, holds(shell, right))
        if sign in ("||", "-o"):
            first = holds(shell, left)
            return True if first else _either(first, holds(shell, right))
        one = text_of(shell, left)
        pattern = pattern_of(shell, right) if sign in ("=", "==", "!=") else text_of(shell, right)
        if sign == "=~" and right.type in ("string", "raw_string"):
            pattern = re.escape(text_of(shell, right))
        return None if pattern is None else binary(shell, one, sign, pattern, pattern=True)
    text = shell.as_tested(text_of(shell, node))
    return None if text is None else bool(text)


def _both(first: Truth, second: Truth) -> Truth:
    return False if second is False else None if first is None else second


def _either(first: Truth, second: Truth) -> Truth:
    return True if second else None if first is None else second


def unary(shell: Shell, sign: str, word: str, written: str = "") -> Truth:
    text = shell.as_tested(word)
    if sign == "-v":
        return written in shell.variables
    if text is None:
        return None
    if sign in ("-z", "-n"):
        return (text == "") == (sign == "-z")
    path = shell.path(text)
    match sign:
        case "-d":
            return bool(text) and path.is_dir()
        case "-f":
            return bool(text) and path.is_file()
        case "-e" | "-r" | "-s":
            return bool(text) and path.exists()
    return None


def binary(shell: Shell, left: str, sign: str, right: str, *, pattern: bool) -> Truth:
    one, other = shell.as_tested(left), shell.as_tested(right)
    if one is None or other is None:
        return None
    if sign in ("=", "==", "!="):
        same = fnmatchcase(one, other) if pattern else one == other
        return same == (sign != "!=")
    if sign == "=~":
        return _matches(shell, one, other)
    if sign in ("<", ">"):
        return one < other if sign == "<" else one > other
    signs = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
    if sign in signs:
        number = computed(shell, f"({one or 0}) {signs[sign]} ({other or 0})")
        return None if number is None else bool(number)
    return None


def _matches(shell: Shell, text: str, pattern: str) -> Truth:
    """``=~``; its groups are then known, and a form that only the shell has is not."""
    found = None
    try:
        known = "[:" not in pattern and len(text) < 10_000
        found = re.search(pattern, text) if known else None
    except re.error:
        known = False
    if not known:
        shell.variables["BASH_REMATCH"] = shell.hole("$BASH_REMATCH of a pattern that is not read", "write its value")
        return None
    groups = [found[0], *(group or "" for group in found.groups())] if found else []
    shell.variables["BASH_REMATCH"] = {str(number): group for number, group in enumerate(groups)}
    return found is not None


def of_words(shell: Shell, words: list[str]) -> Truth:
    """``test`` with its words already expanded."""
    if words[:1] == ["!"]:
        inner = of_words(shell, words[1:])
        return None if inner is None else not inner
    if len(words) == 1:
        text = shell.as_tested(words[0])
        return None if text is None else bool(text)
    if len(words) == 2:
        return unary(shell, words[0], words[1], words[1])
    return binary(shell, words[0], words[1], words[2], pattern=False) if len(words) == 3 else None


def differing(before: dict[str, Value], branches: list[dict[str, Value]]) -> dict[str, Value | None]:
    """The variables that do not end with one value in all branches; None where the value is unknown."""
    names = {name for branch in branches for name in branch}
    return {
        name: None
        for name in names
        if any(branch.get(name) != branches[0].get(name) for branch in branches[1:])
        and any(branch.get(name) != before.get(name) for branch in branches)
    }
