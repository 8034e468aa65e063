"""Parameter expansion: ``$name``, ``${name:-default}``, ``${array[@]}``, ``${name%pattern}`` and their kin."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from fnmatch import translate

from posttrain.dialects.scripts.arithmetic import computed
from posttrain.dialects.scripts.state import HOLE, Shell, not_given

_FORM = re.compile(r"([!#]?)(\w+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"(?:\+{0,2})\w+(?:\.[\w-]+)+=")  # of a key below a section, which may be misspelt
# Variables that the shell itself sets.
_DRAWN = {
    *(
        "RANDOM",
        "SRANDOM",
        "SECONDS",
        "LINENO",
        "EPOCHSECONDS",
        "EPOCHREALTIME",
        "HOSTNAME",
        "UID",
        "EUID",
        "PPID",
        "BASHPID",
    ),
    *(
        "BASH_VERSION",
        "BASH_VERSINFO",
        "OSTYPE",
        "HOSTTYPE",
        "MACHTYPE",
        "FUNCNAME",
        "BASH_LINENO",
        "PIPESTATUS",
        "SHLVL",
    ),
}
Operand = Callable[[str], str]


def parameter(shell: Shell, inside: str, line: int, operand: Operand) -> str | list[str]:
    """Expand what stands between ``${`` and ``}``.

    Args: ``operand`` expands a default or a pattern.
    Returns: the text, or a list for ``$@`` and ``${array[@]}``, whose items stay words of their own between quotes.
    """
    form = _FORM.fullmatch(inside)
    if form is None:
        return _unknown(shell, inside, line)
    prefix, name, index, rest = form.groups()
    if prefix == "!" and index is None:
        name = _text(shell.variables.get(name, ""))
        prefix = ""
    if (otherwise := _not_for_override(shell, name, rest)) is not None:
        return operand(otherwise)
    value = _value(shell, name, operand(index) if index not in (None, "@", "*") else index)
    if prefix == "#":
        if value is not None and HOLE.search(_text(value)):
            return _unknown(shell, inside, line)
        return str(len(value)) if value is not None else "0"
    if prefix == "!":
        array = shell.variables.get(name, {})
        return list(array) if isinstance(array, dict) else []
    return _changed(shell, name, value, rest, line, operand)


def _value(shell: Shell, name: str, index: str | None) -> str | list[str] | None:
    """The value of a parameter; None where it is not set."""
    if name in ("@", "*"):
        return list(shell.positional) if name == "@" else _separator(shell).join(shell.positional)
    if name == "#":
        return str(len(shell.positional))
    if name == "$":
        return str(os.getpid())
    if name == "?" and shell.calls:
        return "0"  # the script is read as if what it has started succeeds: one that tries again until then has an end
    if name in ("?", "!", "-", "_") or (name in _DRAWN and name not in shell.variables):
        return shell.hole(f"${name} is known only to a running shell", "write its value into the script")
    if name.isdigit():
        place = int(name)
        shell.read.add(name)
        if place == 0:
            return str(shell.script)
        if place > len(shell.positional):
            return None
        shell.read_arguments.add(shell.positional[place - 1])
        return shell.positional[place - 1]
    if name == "BASH_SOURCE":
        return str(shell.script)
    shell.read.add(name)
    value = shell.variables.get(name)
    if isinstance(value, str) and HOLE.search(value):
        if name in shell.given:
            return shell.given[name]
        for number in map(int, HOLE.findall(value)):
            # One that holds nothing else goes before one of several parts, such as a name or a path
            if HOLE.fullmatch(value) or number not in shell.carriers:
                shell.carriers[number] = name
    if isinstance(value, dict):
        if index == "@":
            return list(value.values())
        if index == "*":
            return _separator(shell).join(value.values())
        return value.get(index_of(shell, name, index or "0"))
    if value is not None and index == "@":
        return [value]
    return value if index in (None, "0", "@", "*") else None


def _not_for_override(shell: Shell, name: str, rest: str) -> str | None:
    """Return the default of ``${1:-vllm}`` where the argument in its place is an override, meant for ``"$@"``: else the
    script could get no override, since it keeps the first argument. None for everything else."""
    default = re.fullmatch(r":?-([^=]*)", rest)
    if default is None or not name.isdigit() or not 0 < int(name) <= len(shell.positional):
        return None
    word = shell.positional[int(name) - 1]
    if not _OVERRIDE.match(word):
        return None
    shell.remarks.append(f"${name} keeps its default {default[1]}: {word} is an override of the trainer's")
    return default[1]


def index_of(shell: Shell, name: str, text: str) -> str:
    """The index that a text means: a key of an associative array, else a number."""
    if name in shell.associative or shell.as_tested(text) is None:
        return text
    number = computed(shell, text.strip('"') or "0")
    array = shell.variables.get(name)
    if number is not None and number < 0 and isinstance(array, dict):
        number += 1 + max((int(index) for index in array if index.isdigit()), default=-1)
    return text if number is None else str(number)


def _separator(shell: Shell) -> str:
    separator = shell.variables.get("IFS", " ")
    return separator[:1] if isinstance(separator, str) else " "


def _changed(
    shell: Shell, name: str, value: str | list[str] | None, rest: str, line: int, operand: Operand
) -> str | list[str]:
    if not rest:
        return value if value is not None else not_given(shell, name, line)
    bare = None if value is None else shell.as_tested(_text(value))
    default = re.fullmatch(r"(:?)([-=+?])(.*)", rest, re.DOTALL)
    if default is not None:
        colon, kind, word = default.groups()
        lacks = value is None or (bare == "" and (bool(colon) or bool(HOLE.search(_text(value)))))
        if kind == "+":
            return "" if lacks else operand(word)
        if not lacks:
            assert value is not None
            return value
        if kind == "?":
            return not_given(shell, name, line)
        text = operand(word)
        if kind == "=":
            shell.variables[name] = text
        return text
    if value is None:
        return not_given(shell, name, line)
    part = re.fullmatch(r":\s*(-?\d+)\s*(?::\s*(-?\d+))?", rest)
    if isinstance(value, list) and part is not None:
        begin = max(int(part[1]) - (name == "@"), 0) if int(part[1]) >= 0 else int(part[1])
        return value[begin:] if part[2] is None else value[begin:][: int(part[2])]
    if isinstance(value, list):
        changed = [_changed(shell, name, item, rest, line, operand) for item in value]
        return [_text(item) for item in changed]
    if HOLE.search(value):
        return _without_plain(value, rest, operand)
    done = _cut(value, rest, operand)
    return _unknown(shell, f"{name}{rest}", line) if done is None else done


def _without_plain(value: str, rest: str, operand: Operand) -> str:
    """Remove a beginning (``#``) or an end (``%``) without patterns from a value that holds something unknown elsewhere; another
    form leaves it as it is."""
    end = re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL)
    plain = operand(end[2]) if end is not None else ""
    if end is None or HOLE.search(plain) or re.search(r"[*?\[\\]", plain):
        return value
    return value.removesuffix(plain) if end[1].startswith("%") else value.removeprefix(plain)


def _cut(value: str, rest: str, operand: Operand) -> str | None:
    """Apply ``#``, ``%``, ``/``, ``^``, ``,`` or ``:offset:length``; None where the form is another."""
    end = re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL)
    if end is not None:
        return _without(value, operand(end[2]), end[1])
    swap = re.fullmatch(r"/([/#%]?)((?:[^/\\]|\\.)+)(?:/(.*))?", rest, re.DOTALL)
    if swap is not None:
        pattern = _regex(operand(swap[2]))
        start, stop = ("^" if swap[1] == "#" else "", "$" if swap[1] == "%" else "")
        new = operand(swap[3] or "")
        return re.sub(f"{start}(?:{pattern}){stop}", lambda found: new, value, count=0 if swap[1] == "/" else 1)
    if rest in ("^^", ",,"):
        return value.upper() if rest == "^^" else value.lower()
    if rest in ("^", ","):
        return (value[:1].upper() if rest == "^" else value[:1].lower()) + value[1:]
    part = re.fullmatch(r":\s*(-?\d+)\s*(?::\s*(-?\d+))?", rest)
    if part is not None:
        begin = int(part[1])
        tail = value[begin:]
        return tail if part[2] is None else tail[: int(part[2])]
    return None


def _without(value: str, pattern: str, kind: str) -> str:
    """``value`` without its shortest (``#``, ``%``) or longest (``##``, ``%%``) beginning or end that matches."""
    fits = re.compile(_regex(pattern))
    places = range(len(value) + 1)
    if kind.startswith("#"):
        for place in places if kind == "#" else reversed(places):
            if fits.fullmatch(value[:place]):
                return value[place:]
    else:
        for place in reversed(places) if kind == "%" else places:
            if fits.fullmatch(value[place:]):
                return value[:place]
    return value


def _regex(pattern: str) -> str:
    return translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")


def _text(value: str | list[str] | dict[str, str]) -> str:
    return value if isinstance(value, str) else " ".join(value if isinstance(value, list) else value.values())


def _unknown(shell: Shell, inside: str, line: int) -> str:
    return shell.hole(f"${{{inside}}} of line {line} is a form that is not read", "write its value into the script")
