"""Integer arithmetic of the shell, ``$((2 * N))``, with its assignments, ``((N += 1))``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from posttrain.dialects.scripts.parsing import parse
from posttrain.dialects.scripts.state import HOLE, Shell

WIDTH = 64  # bits of the shell's integers
_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*(?:\[[^\]]*\])?"
    r"|\*\*|<<=|>>=|\+\+|--|&&|\|\||<<|>>|[-+*/%&|^<>=!]=|[-+*/%&|^<>=!~?:(),])"
)
_COMMAND = re.compile(r"\$\((?!\()")
_ASSIGN = re.compile(r"(<<|>>|[-+*/%&|^])?=")
_RANKS = [
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
    ("*", "/", "%"), ("**",),
]  # fmt: skip
_RANK = {sign: rank for rank, signs in enumerate(_RANKS) for sign in signs}


class _Unknown(Exception):
    """The expression has a part that is not known, or is none."""


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if a * b >= 0 else -1)


def _power(a: int, b: int) -> int:
    if not 0 <= b < WIDTH:
        raise _Unknown
    return int(a**b)


_TWO: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _quotient, "**": _power,
    "%": lambda a, b: a - b * _quotient(a, b), "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<<": lambda a, b: a << (b % WIDTH), ">>": lambda a, b: a >> (b % WIDTH),
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def arithmetic(shell: Shell, text: str, line: int) -> str:
    """Compute an expression over integers and variables. Returns: the number, or a hole."""
    number = computed(shell, text)
    if number is not None:
        return str(number)
    unset = [name for name in re.findall(r"\b[A-Za-z_]\w*", text) if name not in shell.variables]
    if unset:
        return shell.hole(f"${unset[0]} of line {line} is not set", f"--set {unset[0]}=..., or export it")
    return shell.hole(f"$(({text.strip()})) of line {line} cannot be computed", "write its value into the script")


def computed(shell: Shell, text: str) -> int | None:
    """Evaluate an expression, assigning what it assigns. Returns: None where a part is unknown.

    A variable that an expression with an unknown part would assign is unknown afterwards.
    """
    text = _substituted(shell, text)
    plain = re.sub(r"\$\{?(#|\w+(?:\[[^\]]*\])?)\}?", lambda found: _parameter(shell, found[1]), text)
    try:
        tokens = _tokens(plain.replace('"', ""))
        return _Reader(shell, tokens).whole()
    except (_Unknown, ZeroDivisionError, RecursionError):
        for name in re.findall(r"([A-Za-z_]\w*)\s*(?:(?:<<|>>|[-+*/%&|^])?=(?!=)|\+\+|--)", plain):
            shell.variables[name] = shell.hole(f"${name} is computed from something unknown", f"set {name} to a number")
        for name in re.findall(r"(?:\+\+|--)\s*([A-Za-z_]\w*)", plain):
            shell.variables[name] = shell.hole(f"${name} is computed from something unknown", f"set {name} to a number")
        return None


def _substituted(shell: Shell, text: str) -> str:
    """Return the expression with the outputs of its ``$(...)`` in their places."""
    place = 0
    while found := _COMMAND.search(text, place):
        depth, end = 1, found.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        said = _output(shell, text[found.start() : end])
        text = text[: found.start()] + said + text[end:]
        place = found.start() + len(said)
    return text


def _output(shell: Shell, word: str) -> str:
    """Return what ``$(...)`` prints; the word itself where it is none."""
    root = parse(f": {word}")
    nodes = [node for command in root.named_children[:1] for node in command.named_children[1:]]
    return shell.substitute(shell, nodes[0]) if [node.type for node in nodes] == ["command_substitution"] else word


def _tokens(text: str) -> list[str]:
    found, place = [], 0
    text = text.rstrip()
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise _Unknown
        found.append(token[1])
        place = token.end()
    return found


def _parameter(shell: Shell, name: str) -> str:
    """``$N`` inside an expression: its text, in parentheses where it is more than a name or a number."""
    if name == "#":
        return str(len(shell.positional))
    if name.isdigit():
        place = int(name)
        if place and place <= len(shell.positional):
            shell.read_arguments.add(shell.positional[place - 1])
            return f"({shell.positional[place - 1]})"
        return "?"
    return name


class _Reader:
    """A reader of the tokens of one expression, by precedence."""

    def __init__(self, shell: Shell, tokens: list[str], depth: int = 0):
        self.shell, self.tokens, self.place, self.depth = shell, tokens, 0, depth

    def whole(self) -> int:
        value = self._comma()
        if self.place < len(self.tokens):
            raise _Unknown
        return value

    def _next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def _take(self, sign: str = "") -> str:
        token = self._next()
        if not token or (sign and token != sign):
            raise _Unknown
        self.place += 1
        return token

    def _comma(self) -> int:
        value = self._choice()
        while self._next() == ",":
            self._take()
            value = self._choice()
        return value

    def _choice(self) -> int:
        """An assignment, or ``a ? b : c``; expressions whose unused part assigns are unknown."""
        following = self.tokens[self.place + 1] if self.place + 1 < len(self.tokens) else ""
        if re.match(r"[A-Za-z_]", self._next()) and _ASSIGN.fullmatch(following) and following not in ("==", "!="):
            name = self._take()
            sign = self._take()[:-1]
            value = self._choice()
            return self._set(name, _wrapped(_TWO[sign](self._value(name), value)) if sign else value)
        test = self._two(0)
        if self._next() != "?":
            return test
        self._take()
        begin = self.place
        first = self._choice()
        self._take(":")
        second = self._choice()
        self._no_assignment(begin)
        return first if test else second

    def _no_assignment(self, begin: int) -> None:
        if any(
            sign in ("++", "--") or (_ASSIGN.fullmatch(sign) and sign != "==")
            for sign in self.tokens[begin : self.place]
        ):
            raise _Unknown

    def _two(self, rank: int) -> int:
        if rank == len(_RANKS):
            return self._one()
        value = self._two(rank + 1)
        while _RANK.get(self._next()) == rank:
            sign = self._take()
            begin = self.place
            other = self._two(rank if sign == "**" else rank + 1)
            if sign in ("||", "&&"):
                self._no_assignment(begin)
                value = int(bool(value) or bool(other)) if sign == "||" else int(bool(value) and bool(other))
            else:
                value = _wrapped(int(_TWO[sign](value, other)))
        return value

    def _one(self) -> int:
        token = self._take()
        if token in ("++", "--"):
            name = self._take()
            return self._set(name, self._value(name) + (1 if token == "++" else -1))
        if token in ("+", "-", "!", "~"):
            value = self._one()
            return _wrapped({"+": value, "-": -value, "!": int(not value), "~": ~value}[token])
        if token == "(":
            value = self._comma()
            self._take(")")
            return value
        if token[0].isdigit():
            return _integer(token)
        value = self._value(token)
        if self._next() in ("++", "--"):
            self._set(token, value + (1 if self._take() == "++" else -1))
        return value

    def _value(self, name: str) -> int:
        """The number of a variable, whose text is an expression of its own."""
        given = self.shell.variables.get(name)
        text = given.get("0", "") if isinstance(given, dict) else given
        self.shell.read.add(name)
        if text is not None and HOLE.search(text):
            text = self.shell.given.get(name, text)
        if "[" in name or text is None or HOLE.search(text) or self.depth > 10:
            raise _Unknown
        return _Reader(self.shell, _tokens(text), self.depth + 1).whole() if text.strip() else 0

    def _set(self, name: str, value: int) -> int:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise _Unknown
        self.shell.variables[name] = str(_wrapped(value))
        return _wrapped(value)


def _integer(token: str) -> int:
    try:
        if "#" in token:
            base, _, digits = token.partition("#")
            return _wrapped(int(digits, int(base))) if 2 <= int(base) <= 36 else _wrapped(int("?"))
        if token.lower().startswith("0x"):
            return _wrapped(int(token, 16))
        return _wrapped(int(token, 8 if len(token) > 1 and token[0] == "0" else 10))
    except ValueError:
        raise _Unknown from None


def _wrapped(value: int) -> int:
    return (int(value) + 2 ** (WIDTH - 1)) % 2**WIDTH - 2 ** (WIDTH - 1)
