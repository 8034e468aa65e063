"""The result of every dialect: the configuration, and its names in the user's own dialect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from posttrain.config.base import Section
from posttrain.config.reading.sources import SourceMap, same_branch
from posttrain.errors import ConfigError, Problem

C = TypeVar("C", bound=Section)


class UserWords(Protocol):
    """Speaks about our fields in the keys of a dialect."""

    def key(self, field: str) -> str:
        """Return the dialect's key of one of our fields; "" without one."""
        ...

    def text(self, text: str) -> str:
        """A sentence with our field names replaced by their keys."""
        ...

    def counts(self, field: str) -> list[str]:
        """Return the written keys that count a field of ours in another way, each with its value and its conversion."""
        ...

    def value(self, key: str) -> Any:
        """Return the value of a key of the dialect, written or default; NOTHING without one."""
        ...

    def translate(self, problems: Iterable[Problem]) -> list[Problem]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A key that was written and has no effect, and why."""

    key: str
    reason: str
    where: str
    asks: bool = True  # it is written with another value than its default


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig(Generic[C]):
    """A configuration as it was understood.

    ``problems`` lists what is wrong with single keys. While there are any, ``config`` holds the defaults in their place:
    good enough to look at files and report everything together, not to run. ``unsupported`` is planned: a plan can be made
    of it, a run is refused. ``words`` is None where the keys are our own.
    """

    config: C
    sources: SourceMap
    dialect: str
    entry: str = "train"  # whose configuration it is: a name in entries.ENTRIES
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    unsupported: tuple[Problem, ...] = ()
    changes: tuple[str, ...] = ()  # what --here changed, in sentences
    words: UserWords | None = None
    # Keys that look misspelt, and are no errors by themselves: other problems may follow from them
    slips: tuple[Problem, ...] = ()

    def key(self, field: str) -> str:
        """The user's name for one of our fields; ours where theirs has none."""
        return (self.words.key(field) if self.words else "") or field

    def text(self, text: str) -> str:
        """A sentence with our field names replaced by the user's."""
        return self.words.text(text) if self.words else text

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """The same problems with ``field`` turned into ``where``: the user's file, line and key."""
        if self.words is not None:
            return self.words.translate(problems)
        return [
            replace(problem, where=self.sources.where(problem.field))
            if problem.field and not problem.where
            else problem
            for problem in problems
        ]

    def further(self, problems: Iterable[Problem]) -> list[Problem]:
        """The same, located, without those about keys that are reported already: they only follow from the default there. The
        first problems come with the keys that look misspelt."""
        reported = [problem.field for problem in self.problems if problem.field]
        found = [
            problem
            for problem in self.locate(problems)
            if not any(same_branch(problem.field, field) for field in reported)
        ]
        return [*self.slips, *found] if found and not self.problems else found

    def warned(self, texts: Iterable[str]) -> LoadedConfig[C]:
        """The same with further warnings, which are turned into the user's keys."""
        return replace(self, warnings=(*self.warnings, *map(self.text, texts)))

    def runnable(self) -> LoadedConfig[C]:
        """This, when nothing is wrong with it and nothing in it is only planned.

        Raises: ConfigError with every problem.
        """
        if self.problems or self.unsupported:
            raise ConfigError([*self.problems, *self.unsupported])
        return self

    def checked(self) -> LoadedConfig[C]:
        """This, when nothing is wrong with it.

        Raises: ConfigError with every problem.
        """
        if self.problems:
            raise ConfigError(self.problems)
        return self


def expand_home(config: C) -> C:
    """``~`` becomes the home folder in every field that holds paths: those whose name is or ends in path, file, files or
    folder. Other paths stay relative to the current folder."""
    return config.model_copy(update={name: _home(name, getattr(config, name)) for name in type(config).model_fields})


def _home(name: str, value: Any) -> Any:
    match value:
        case Section():
            return expand_home(value)
        case list():
            return [_home(name, item) for item in value]
        case str() if name.rpartition("_")[2] in ("path", "file", "files", "folder"):
            return str(Path(value).expanduser()) if value == "~" or value.startswith("~/") else value
        case _:
            return value
