"""Differences of a checkout's own code from verl's that a run needs confirmed by name: the code is not called.

Each has a word for ``posttrain.own_keys``. Of calls, those count that the configuration lets happen (``guards``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from posttrain.dialects.own_keys import OWN_KEYS
from posttrain.dialects.scripts.guards import Look
from posttrain.errors import Problem

_SHOWN = 4


class Place(Protocol):
    """A line of a checkout's code that a run may leave out."""

    @property
    def line(self) -> int: ...

    def may_happen(self, look: Look) -> bool:
        """Return False where the configuration decides that the code is not reached."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A clause about calls: ``calls a (line 1), b (line 2), which verl's does not``."""

    before: str
    calls: Mapping[str, Sequence[Place]]  # names of calls -> their places
    after: str = ""

    def text(self, look: Look | None) -> str:
        """The clause with the calls that may happen; "" where none does."""
        found = {
            name: places[0].line
            for name, each in self.calls.items()
            if (places := [one for one in each if look is None or one.may_happen(look)])
        }
        return f"{self.before} {listed(found)}{self.after}".strip() if found else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A difference to be confirmed by name."""

    field: str  # the word in posttrain.own_keys
    title: str  # the beginning of the sentence
    parts: tuple[Part | str, ...]
    end: str = ""
    meant: str  # of the confirmation: ``confirm by name that ...``
    where: str = ""

    @property
    def what(self) -> str:
        """The whole of it, whatever the configuration says."""
        return self._said(None)

    @property
    def fix(self) -> str:
        return f"{self.meant}: +{OWN_KEYS}=[{self.field}]"

    def problem(self, look: Look) -> Problem | None:
        """The problem under a configuration; None where none of the calls happens."""
        said = self._said(look)
        return Problem(said, fix=self.fix, where=self.where, field=self.field) if said else None

    def _said(self, look: Look | None) -> str:
        texts = [each if isinstance(each, str) else each.text(look) for each in self.parts]
        said = ", and ".join(text for text in texts if text)
        return f"{self.title} {said}{self.end}" if said else ""


def listed(calls: Mapping[str, int]) -> str:
    """Return the calls as a text: ``a (line 1), b (line 2) and 3 more``."""
    shown = ", ".join(f"{name} (line {line})" for name, line in list(calls.items())[:_SHOWN])
    return shown + (f" and {len(calls) - _SHOWN} more" if len(calls) > _SHOWN else "")


def asked(asks: Sequence[Ask], look: Look) -> tuple[list[Problem], list[str]]:
    """Return what a configuration leaves to be confirmed by name, and a note for each that it confirms."""
    named = look(OWN_KEYS) if asks else None
    found = [problem for each in asks if (problem := each.problem(look)) is not None]
    confirmed = [each for each in found if isinstance(named, list) and each.field in named]
    notes = [f"{each.what}, at {each.where}; confirmed by name ({each.field})" for each in confirmed]
    return [each for each in found if each not in confirmed], notes
