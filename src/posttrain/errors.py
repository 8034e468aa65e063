"""The error family: what a user can get wrong, what can stop a run, and the exit code of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a request.

    ``field`` is the RunConfig path (``rollout.samples_per_prompt``) where the problem belongs to one; the dialect that
    read the file turns it into ``where``, the user's own file, line and key.
    """

    what: str
    fix: str = ""
    where: str = ""
    field: str = ""

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f", at {self.where}"
        if self.fix:
            text += f"; {self.fix}"
        return text


class PosttrainError(Exception):
    """Base of every error this package raises on purpose. ``exit_code`` is what the command line ends with."""

    exit_code = 3


class RequestError(PosttrainError):
    """The request is wrong (configuration, data, paths); nothing was started. Holds every problem found, not the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem] | Problem | str):
        if isinstance(problems, str):
            problems = [Problem(problems)]
        elif isinstance(problems, Problem):
            problems = [problems]
        self.problems = list(problems)
        super().__init__()

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def locate(self, locate: Callable[[Sequence[Problem]], list[Problem]]) -> None:
        """Put the user's file, line and key to the problems; ``locate`` knows them (a dialect's LoadedConfig.locate)."""
        self.problems = locate(self.problems)


class ConfigError(RequestError):
    """The configuration cannot be run."""


class DataError(RequestError):
    """A dataset cannot be read or does not hold what the configuration says it holds."""


class ModelError(RequestError):
    """A model folder cannot be used: no weights, no tokenizer, an architecture that cannot be trained."""


class UnknownName(RequestError):
    """A name was looked up in a registry that does not hold it."""


class MissingDependency(RequestError):
    """An optional library is needed and not installed."""


class ShapeError(PosttrainError, ValueError):
    """Tensors that must agree in shape do not. A programming error, not a user's."""


class RunStopped(PosttrainError):
    """The run ended itself: it could not go on without silently doing something wrong."""

    exit_code = 3


class RunInterrupted(PosttrainError):
    """The run was asked to stop by a signal and has saved its state; starting it again continues it."""

    exit_code = 75


def nearest(name: str, known: Sequence[str] | Mapping[str, object]) -> str | None:
    """The known name most like ``name``, or None when nothing is close enough to be a misspelling."""
    begins = [each for each in known if len(name) >= 3 and each.startswith(name)]  # ppo: ppo_clip, not dppo_tv
    matches = get_close_matches(name, begins, n=1, cutoff=0.0) or get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Sequence[str] | Mapping[str, object], *, listed: bool = False) -> str:
    """The fix to offer for a wrong name: the nearest known one, or all of them when they are few and the problem has not
    ``listed`` them already."""
    guess = nearest(name, known)
    if guess:
        return f"did you mean {guess}?"
    if listed:
        return ""
    names = sorted(known)
    return f"known: {', '.join(names)}" if len(names) <= 30 else ""
