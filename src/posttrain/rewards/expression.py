r"""Evaluation of a mathematical expression in LaTeX or plain notation, without running text as a program.

A small grammar compiles into functions over complex numbers: + - * / ^, \frac, \sqrt (with an
index), \pi, ln, log, exp, sin, cos, tan, brackets of all kinds, one-letter variables, products without a sign (2x, 3\pi)
and mixed numbers (1\frac{1}{2}). Time is linear in the length. A text longer than MAX_LENGTH, nested deeper than
MAX_DEPTH, or outside the grammar has no value.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Callable, Mapping
from functools import partial

MAX_LENGTH = 500  # characters
MAX_DEPTH = 40

Values = Mapping[str, complex]  # by variable, and by \pi
Step = Callable[[Values], complex]

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)|\\([A-Za-z]+)|(\*\*|[A-Za-z+\-*/^(){}\[\]]|[π√×·÷−]))")
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "ln": cmath.log,
    "log": cmath.log10,
    "exp": cmath.exp,
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
}
_WORDS = {"cdot": "*", "times": "*", "div": "/", "pi": "π", "sqrt": "√", "tfrac": "frac", "dfrac": "frac"}
_SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", "**": "^"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class NoValue(ValueError):
    """The text is no expression of this grammar, or has no finite value."""


class Expression:
    """A parsed expression. ``variables`` are its letters."""

    def __init__(self, text: str):
        """Parse a text. Raises: NoValue."""
        reader = _Reader(_tokens(text))
        self._value = reader.sum(0)
        reader.expect_end()
        self.variables = frozenset(reader.variables)

    def at(self, values: Values) -> complex:
        """Evaluate the expression at these values of the variables and of π.

        Raises: NoValue when it has none (a division by zero, a number beyond floats).
        """
        try:
            value = self._value(values)
        except (ArithmeticError, ValueError) as error:
            raise NoValue(str(error)) from error
        if not cmath.isfinite(value):
            raise NoValue("not finite")
        return value


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_LENGTH:
        raise NoValue("too long")
    tokens, position = [], 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NoValue(f"unexpected {text[position]!r}")
        number, word, sign = match.groups()
        if word is not None:
            if word not in ("frac", *_FUNCTIONS, *_WORDS):
                raise NoValue(f"unexpected \\{word}")
            word = _WORDS.get(word, word)
        tokens.append(number or word or _SIGNS.get(sign, sign))
        position = match.end()
    return tokens


class _Reader:
    """Recursive-descent parser over tokens; every method parses one kind of phrase and returns a function that evaluates it."""

    def __init__(self, tokens: list[str]):
        self._tokens = tokens
        self._position = 0
        self.variables: set[str] = set()

    def expect_end(self) -> None:
        if self._next() is not None:
            raise NoValue(f"unexpected {self._next()!r}")

    def sum(self, depth: int) -> Step:
        if depth > MAX_DEPTH:
            raise NoValue("nested too deep")
        terms = [self._signed(depth)]
        while self._next() in ("+", "-"):
            terms.append(self._signed(depth))
        return lambda values: sum((term(values) for term in terms), start=0j)

    def _signed(self, depth: int) -> Step:
        negative = False
        while self._next() in ("+", "-"):
            negative ^= self._take() == "-"
        product = self._product(depth)
        return (lambda values: -product(values)) if negative else product

    def _product(self, depth: int) -> Step:
        factors = [(self._mixed_number(depth), False)]
        while (token := self._next()) is not None and token not in ("+", "-", ")", "]", "}"):
            divides = token == "/"
            if token in ("*", "/"):
                self._take()
                sign = self._next()
                if sign in ("+", "-"):
                    factors.append((self._signed(depth + 1), divides))
                    continue
            factors.append((self._power(depth), divides))
        return partial(_product_of, factors)

    def _mixed_number(self, depth: int) -> Step:
        """Parse a power; a whole number directly before a \\frac of whole numbers is added to it."""
        window = self._tokens[self._position : self._position + 8]
        whole, *fraction = window or [""]
        pieces = [fraction[i] for i in (2, 5)] if len(fraction) == 7 else []
        if (
            whole.isdigit()
            and fraction[:2] == ["frac", "{"]
            and fraction[3:5] == ["}", "{"]
            and fraction[6:] == ["}"]
            and all(piece.isdigit() for piece in pieces)
        ):
            self._position += 8
            mixed = float(whole) + _divide(float(pieces[0]), float(pieces[1]))
            return lambda values: mixed
        return self._power(depth)

    def _power(self, depth: int) -> Step:
        if depth > MAX_DEPTH:
            raise NoValue("nested too deep")
        base = self._atom(depth)
        if self._next() != "^":
            return base
        self._take()
        negative = self._next() == "-"
        if negative:
            self._take()
        exponent = self._power(depth + 1)
        return lambda values: base(values) ** (-exponent(values) if negative else exponent(values))

    def _atom(self, depth: int) -> Step:
        token = self._take()
        if token is None:
            raise NoValue("ends too early")
        if token[0].isdigit() or token[0] == ".":
            number = complex(float(token))
            return lambda values: number
        if token in _CLOSING:
            return self._closed(token, depth)
        if token == "frac":
            above, below = self._argument(depth), self._argument(depth)
            return lambda values: _divide(above(values), below(values))
        if token == "√":
            return self._root(depth)
        if token in _FUNCTIONS:
            function, argument = _FUNCTIONS[token], self._power(depth + 1)
            return lambda values: function(argument(values))
        if token == "π" or (len(token) == 1 and token.isalpha()):
            if token != "π":
                self.variables.add(token)
            return lambda values: values[token]
        raise NoValue(f"unexpected {token!r}")

    def _argument(self, depth: int) -> Step:
        """Parse {…}, or a single character, as in \\frac12."""
        token = self._next()
        if token is not None and token.isdigit() and len(token) > 1:
            self._tokens[self._position : self._position + 1] = [token[0], token[1:]]
        return self._atom(depth + 1)

    def _root(self, depth: int) -> Step:
        index: Step | None = None
        if self._next() == "[":
            self._take()
            index = self._closed("[", depth)
        inside = self._argument(depth)
        if index is None:
            return lambda values: cmath.sqrt(inside(values))
        found = index
        return lambda values: inside(values) ** _divide(1.0, found(values))

    def _closed(self, opening: str, depth: int) -> Step:
        value = self.sum(depth + 1)
        if self._take() != _CLOSING[opening]:
            raise NoValue(f"{opening} is not closed")
        return value

    def _next(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self) -> str | None:
        token = self._next()
        self._position += 1
        return token


def _product_of(factors: list[tuple[Step, bool]], values: Values) -> complex:
    product = 1 + 0j
    for factor, divides in factors:
        product = _divide(product, factor(values)) if divides else product * factor(values)
    return product


def _divide(above: complex, below: complex) -> complex:
    if below == 0:
        raise NoValue("division by zero")
    return above / below


def close(one: complex, other: complex, relative: float) -> bool:
    """Return True when two numbers differ by at most ``relative`` times the larger; where one is 0, by at most 1e-12."""
    return cmath.isclose(one, other, rel_tol=relative, abs_tol=1e-12)


PI = math.pi
