"""Control structures of a script: branches, loops, ``case``, subshells. Under an unknown condition both ways are followed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

from posttrain.dialects.scripts.arithmetic import computed
from posttrain.dialects.scripts.conditions import Truth, differing
from posttrain.dialects.scripts.expansion import pattern_of, source, text_of, words_of
from posttrain.dialects.scripts.limits import MAX_TURNS
from posttrain.dialects.scripts.state import Leave, Node, Shell, Value

_LOOKS = re.compile(r"\b(?:curl|wget|nc|kill -0|pgrep|lsof|ray (?:status|job)|nvidia-smi)\b")


def body(shell: Shell, nodes: Iterable[Node]) -> Truth:
    """Follow statements one after the other; one before a ``&`` has a shell of its own."""
    status: Truth = True
    followed = list(nodes)
    for place, node in enumerate(followed):
        if not node.is_named or node.type == "comment":
            continue
        if place + 1 < len(followed) and followed[place + 1].type == "&":
            with subshell(shell):
                shell.follow(shell, node)
            status = True
        else:
            status = shell.follow(shell, node)
    return status


@contextmanager
def subshell(shell: Shell) -> Iterator[None]:
    """A shell of its own: its variables and folder end with it, and so does an ``exit``."""
    kept = dict(shell.variables), shell.folder, list(shell.positional), dict(shell.functions), set(shell.exported)
    ended = shell.ended
    try:
        yield
    except Leave:
        shell.ended = ended
    finally:
        shell.variables, shell.folder, shell.positional, shell.functions, shell.exported = kept


def follow_list(shell: Shell, node: Node) -> Truth:
    """``a && b``, ``a || b``; what b assigns is unknown where the status of a is."""
    left, sign, right = node.children[0], source(node.children[1]), node.children[-1]
    status = shell.follow(shell, left)
    if sign not in ("&&", "||"):
        return shell.follow(shell, right)
    if status is None:
        return either_way(shell, [[right]], node, sign, may_skip=True)
    return _branch(shell, [right]) if status == (sign == "&&") else status


def follow_if(shell: Shell, node: Node) -> Truth:
    branches: list[tuple[list[Node], list[Node]]] = [([], [])]
    after_then = False
    for child in node.children:
        if child.type in ("elif_clause", "else_clause"):
            inner = child.children
            then = next((place for place, each in enumerate(inner) if each.type == "then"), 0)
            branches.append((list(inner[:then]), list(inner[then:])))
        elif child.type == "then":
            after_then = True
        else:
            branches[0][1 if after_then else 0].append(child)
    for number, (condition, then_part) in enumerate(branches):
        truth = body(shell, condition) if condition else True
        if truth:
            return _branch(shell, then_part)
        if truth is None:
            return either_way(shell, [part for _, part in branches[number:]], node, "if", branches[-1][0] != [])
    return True


def _branch(shell: Shell, nodes: Iterable[Node]) -> Truth:
    """Follow the statements of a branch, up to an ``exit`` of a guard that is passed."""
    try:
        return body(shell, nodes)
    except Leave as left:
        if not shell.passes(left):
            raise
        return None


def either_way(shell: Shell, parts: list[list[Node]], node: Node, kind: str, may_skip: bool) -> Truth:
    """Follow every branch; a variable that they leave with different values is unknown afterwards."""
    before = dict(shell.variables)
    positional, folder = list(shell.positional), shell.folder
    ends: list[dict[str, Value]] = [dict(before)] if may_skip else []
    for part in parts:
        shell.variables, shell.positional = dict(before), list(positional)
        try:
            body(shell, part)
        except Leave:
            continue
        ends.append(shell.variables)
        folder = shell.folder
    shell.variables, shell.positional, shell.folder = dict(ends[0]) if ends else before, positional, folder
    for name in differing(before, ends) if ends else ():
        what = f"${name} depends on the `{kind}` of line {shell.line(node)}, which runs a program"
        shell.variables[name] = shell.hole(what, f"set {name} without a condition")
    return None


def follow_for(shell: Shell, node: Node) -> Truth:
    name = source(node.child_by_field_name("variable"))
    inner = node.child_by_field_name("body")
    values = [word for child in node.children_by_field_name("value") for word in words_of(shell, child)]
    if not any(child.type == "in" for child in node.children):
        values = list(shell.positional)
    if len(values) > MAX_TURNS or any(shell.as_tested(value) is None for value in values):
        why = (
            f"takes {len(values)} values, more than are followed"
            if len(values) > MAX_TURNS
            else "takes what a program says"
        )
        shell.variables[name] = shell.hole(
            f"${name}: the loop of line {shell.line(node)} {why}", f"set {name} without a loop"
        )
        lost(shell, node)
        shell.variables[name] = shell.hole(
            f"${name}: the loop of line {shell.line(node)} {why}", f"set {name} without a loop"
        )
        return None
    status: Truth = True
    for value in values:
        shell.variables[name] = value
        try:
            status = body(shell, inner.children)
        except Leave as left:
            if _leaves_loop(left):
                break
    return status


def follow_while(shell: Shell, node: Node) -> Truth:
    inner = node.child_by_field_name("body")
    until = node.children[0].type == "until"
    conditions = [child for child in node.named_children if child != inner]
    before = dict(shell.variables)
    for _ in range(MAX_TURNS):
        truth = body(shell, conditions)
        if truth is None:
            break
        if truth == until:
            return True
        try:
            body(shell, inner.children)
        except Leave as left:
            if _leaves_loop(left):
                return True
        if _waits(inner):
            break
    else:
        after, shell.variables = shell.variables, before
        _forget(shell, node, after)
        return None
    return lost(shell, node)


def _waits(body: Node) -> bool:
    """Tell whether a loop's body sleeps until another process answers or ends: how many turns that takes is not known."""
    text = source(body)
    return bool(re.search(r"(?m)^\s*sleep\s", text) and _LOOKS.search(text))


def follow_counting(shell: Shell, node: Node) -> Truth:
    """``for ((i = 0; i < 3; i++))``."""
    inner = node.child_by_field_name("body")
    written = source(node).partition("((")[2].partition("))")[0].split(";")
    before = dict(shell.variables)
    if len(written) != 3 or (written[0].strip() and computed(shell, written[0]) is None):
        return lost(shell, node)
    for _ in range(MAX_TURNS):
        number = computed(shell, written[1]) if written[1].strip() else 1
        if number is None:
            return lost(shell, node)
        if not number:
            return True
        try:
            body(shell, inner.children)
        except Leave as left:
            if _leaves_loop(left):
                return True
        if written[2].strip():
            computed(shell, written[2])
    after, shell.variables = shell.variables, before
    _forget(shell, node, after)
    return None


def _leaves_loop(left: Leave) -> bool:
    """True where a loop ends, False where its next turn begins; what is no loop's business is raised again."""
    if left.kind not in ("break", "continue"):
        raise left
    if left.levels > 1:
        raise Leave(left.kind, left.status, left.levels - 1)
    return left.kind == "break"


def lost(shell: Shell, node: Node) -> Truth:
    """Follow a loop whose turns are unknown once; what it changes is unknown afterwards."""
    return either_way(shell, [list((node.child_by_field_name("body") or node).children)], node, "loop", may_skip=True)


def _forget(shell: Shell, node: Node, after: dict[str, Value]) -> None:
    for name in differing(shell.variables, [dict(shell.variables), after]):
        what = f"${name}: the loop of line {shell.line(node)} has more than {MAX_TURNS} turns, which are not followed"
        shell.variables[name] = shell.hole(what, f"set {name} without a loop")


def follow_case(shell: Shell, node: Node) -> Truth:
    value = shell.as_tested(text_of(shell, node.child_by_field_name("value")))
    items = [child for child in node.named_children if child.type == "case_item"]
    falls = any(child.type in (";&", ";;&") for item in items for child in item.children)
    if value is None or falls:
        return either_way(shell, [_item_body(item) for item in items], node, "case", may_skip=True)
    for item in items:
        patterns = [pattern_of(shell, child) for child in item.children_by_field_name("value")]
        if any(pattern is not None and fnmatchcase(value, pattern) for pattern in patterns):
            return _branch(shell, _item_body(item))
        if None in patterns:
            return either_way(shell, [_item_body(each) for each in items], node, "case", may_skip=True)
    return True


def _item_body(item: Node) -> list[Node]:
    place = next((number for number, child in enumerate(item.children) if child.type == ")"), 0)
    return [child for child in item.children[place + 1 :] if child.type not in (";;", ";&", ";;&")]
