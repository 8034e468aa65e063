"""Assignments: ``name=value``, ``name+=value``, arrays, ``declare``, ``local``, ``export`` and ``unset``."""

from __future__ import annotations

import re

from posttrain.dialects.scripts.arithmetic import computed
from posttrain.dialects.scripts.expansion import source, text_of, words_of
from posttrain.dialects.scripts.parameters import index_of
from posttrain.dialects.scripts.state import Node, Shell, Value

_NAME = re.compile(r"[A-Za-z_]\w*")


def assign(shell: Shell, node: Node) -> str:
    """``name=value``, ``name+=value``, ``name=(a b)`` and ``name[index]=value``. Returns: the name."""
    target = node.child_by_field_name("name")
    given = node.child_by_field_name("value")
    adds = any(child.type == "+=" for child in node.children)
    subscript = target.type == "subscript"
    name = source(target.child_by_field_name("name")) if subscript else source(target)
    if given is not None and given.type == "array":
        _assign_array(shell, name, given, adds)
    elif subscript:
        old = shell.variables.get(name)
        array = dict(old) if isinstance(old, dict) else {} if old is None else {"0": old}
        index = index_of(shell, name, text_of(shell, target.child_by_field_name("index")))
        text = text_of(shell, given) if given is not None else ""
        array[index] = array.get(index, "") + text if adds else text
        shell.variables[name] = array
    else:
        if given is not None and name not in shell.variables and source(given).strip('"${}') != name:
            shell.variables[name] = ""  # A="$A more" begins empty
        text = text_of(shell, given) if given is not None else ""
        put(shell, name, text, adds=adds, line=shell.line(node))
    if shell.exports_all:
        shell.exported.add(name)
    return name


def put(shell: Shell, name: str, text: str, *, adds: bool = False, line: int = 0) -> None:
    """Assign a text; of an array it is the first item."""
    old = shell.variables.get(name, "")
    if name in shell.integers:
        number = computed(shell, f"({old}) + ({text})" if adds and old else text or "0")
        fix = f"set {name} to a number"
        text = (
            shell.hole(f"${name} of line {line} is computed from something unknown", fix)
            if number is None
            else str(number)
        )
        adds = False
    if isinstance(old, dict):
        shell.variables[name] = {**old, "0": old.get("0", "") + text if adds else text}
    else:
        shell.variables[name] = shell.bounded(old + text if adds else text, line)


def _assign_array(shell: Shell, name: str, given: Node, adds: bool) -> None:
    old = shell.variables.get(name)
    array: dict[str, str] = {}
    if adds:
        array = dict(old) if isinstance(old, dict) else {"0": old} if old else {}
    following = 1 + max((int(index) for index in array if index.isdigit()), default=-1)
    for child in given.named_children:
        if child.type == "comment":
            continue
        indexed = re.match(r"\[([^\]]+)\]=", source(child))
        if indexed is not None:  # ([2]=x): the items are not in the order that is written
            what = f"the array {name} of line {shell.line(given)} names its indices, which is a form that is not read"
            shell.variables[name] = shell.hole(what, f"write {name}[{indexed[1]}]=... as a line of its own")
            return
        for word in words_of(shell, child):
            array[str(following)] = word
            following += 1
    shell.variables[name] = array


def declare(shell: Shell, node: Node) -> None:
    """``export``, ``local``, ``declare``, ``typeset`` and ``readonly`` with what they assign."""
    keyword = source(node.children[0])
    words = [source(child) for child in node.named_children if child.type == "word"]
    flags = "".join(word[1:] for word in words if word.startswith("-"))
    for child in node.named_children:
        if child.type == "variable_assignment":
            target = child.child_by_field_name("name")
            _mark(shell, keyword, flags, source(target).split("[")[0])
            if "n" in flags:
                value = child.child_by_field_name("value")
                _refer(shell, source(target), text_of(shell, value) if value is not None else "")
                continue
            name = assign(shell, child)
            _change_case(shell, flags, name)
        elif child.type in ("variable_name", "word", "simple_expansion", "string", "concatenation", "expansion"):
            for word in words_of(shell, child):
                declare_word(shell, keyword, flags, word)


def declare_word(shell: Shell, keyword: str, flags: str, word: str) -> None:
    """One argument of ``export`` and its kin, expanded."""
    name, equals, value = word.partition("=")
    adds = name.endswith("+")
    name = name.removesuffix("+")
    if not _NAME.fullmatch(name):
        return
    _mark(shell, keyword, flags, name)
    if equals and "n" not in flags:
        put(shell, name, value, adds=adds)
    elif equals and keyword != "export":
        _refer(shell, name, value)


def _refer(shell: Shell, name: str, target: str) -> None:
    """``local -n name=target``: in a function the name has the other variable's value, and hands its own back at the end."""
    if not shell.locals or not _NAME.fullmatch(target) or target == name:
        return
    shell.references[-1][name] = target
    value = shell.variables.get(target)
    restored(shell, {name: dict(value) if isinstance(value, dict) else value})


def _mark(shell: Shell, keyword: str, flags: str, name: str) -> None:
    if (keyword == "local" or (keyword in ("declare", "typeset") and "g" not in flags)) and shell.locals:
        shell.locals[-1].setdefault(name, shell.variables.get(name))
    if keyword == "local" and shell.locals:
        shell.variables.pop(name, None)
    if (keyword == "export" and "n" not in flags) or "x" in flags:
        shell.exported.add(name)
    if "i" in flags:
        shell.integers.add(name)
    if "A" in flags:
        shell.associative.add(name)
    if "n" in flags and keyword != "export":
        shell.variables[name] = shell.hole(
            f"{name} stands for another variable, which is not read", f"set {name} itself"
        )


def _change_case(shell: Shell, flags: str, name: str) -> None:
    value = shell.variables.get(name)
    if isinstance(value, str) and ("u" in flags or "l" in flags):
        shell.variables[name] = value.upper() if "u" in flags else value.lower()


def unset(shell: Shell, words: list[str]) -> None:
    for word in words:
        item = re.fullmatch(r"(\w+)\[(.+)\]", word)
        if item is not None:
            array = shell.variables.get(item[1])
            if isinstance(array, dict):
                index = index_of(shell, item[1], item[2])
                shell.variables[item[1]] = {key: value for key, value in array.items() if key != index}
        elif "-f" in words:
            shell.functions.pop(word, None)
        else:
            shell.variables.pop(word, None)
            shell.exported.discard(word)


def restored(shell: Shell, outer: dict[str, Value | None]) -> None:
    """Give the variables that a function made its own the values that they have outside of it."""
    for name, value in outer.items():
        if value is None:
            shell.variables.pop(name, None)
        else:
            shell.variables[name] = value
