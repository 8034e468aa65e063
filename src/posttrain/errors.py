"""Errors: faults of a request, reasons to stop a run, and the exit code of each."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

_PACKAGE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a request.

    ``field`` is the RunConfig path (``rollout.samples_per_prompt``), if there is one; the dialect that read the file turns it
    into ``where``: the user's own file, line and key. ``library`` names one that is not installed, where installing it is all
    that lacks; ``refused`` marks a key that is right and cannot be honoured.
    """

    what: str
    fix: str = ""
    where: str = ""
    field: str = ""
    library: str = ""
    refused: bool = False

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f", at {self.where}"
        if self.fix:
            text += f"; {self.fix}"
        return text


class PosttrainError(Exception):
    """Base of the errors that this package raises on purpose. ``exit_code`` is the exit code of the command."""

    exit_code = 3


class _Explained(PosttrainError):
    """Base of the errors whose text is all that a user needs: in a notebook it takes the place of the traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the caller's own line, then the text of the command line."""
        frames = traceback.extract_tb(self.__traceback__)
        ours = [number for number, frame in enumerate(frames) if Path(frame.filename).is_relative_to(_PACKAGE)]
        callers = frames[: ours[0]][-1:] if ours else frames[-1:]
        places = [f"line {frame.lineno}: {frame.line}" for frame in callers]
        return [*places, *f"{type(self).__name__}: {self._described()}".splitlines()]

    def _described(self) -> str:
        return str(self)


class RequestError(_Explained):
    """The request is wrong (configuration, data, paths); nothing was started. Holds all problems found."""

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
        """Add the user's file, line and key to the problems; ``locate`` finds them (a dialect's LoadedConfig.locate)."""
        self.problems = locate(self.problems)

    def _described(self) -> str:
        if len(self.problems) < 2:
            return str(self)
        numbered = [f"{number}. {problem}" for number, problem in enumerate(self.problems, start=1)]
        return "\n".join([f"{len(numbered)} problems, and nothing was started:", *numbered])


class ConfigError(RequestError):
    """The configuration cannot be run."""


class DataError(RequestError):
    """A dataset cannot be read, or does not match the configuration."""


class UnreadImages(DataError):
    """An environment shows images, and the model reads text only: none of its episodes can be played."""


class ModelError(RequestError):
    """A model folder cannot be used: weights or tokenizer are missing, or the architecture cannot be trained."""


class UnknownName(RequestError):
    """A registry does not hold the requested name."""


class MissingDependency(RequestError):
    """A needed optional library is not installed."""


class ShapeError(PosttrainError, ValueError):
    """Tensors whose shapes must agree differ. A programming error, not a user's."""


class RunStopped(_Explained):
    """The run stopped itself, because continuing would silently produce wrong results."""

    exit_code = 3


class RunInterrupted(_Explained):
    """A signal stopped the run, which has saved its state; starting it again resumes it."""

    exit_code = 75


def nearest(name: str, known: Sequence[str] | Mapping[str, object]) -> str | None:
    """Return the known name most similar to ``name``; None when none is close enough to be a misspelling."""
    # Prefer a name with this beginning: ppo suggests ppo_clip, not dppo_tv.
    begins = [each for each in known if len(name) >= 3 and each.startswith(name)]
    # Likeness depends on the order of the two: tictactoe is like interaction, and interaction is not like tictactoe.
    alike = [each for each in known if get_close_matches(each, [name], n=1, cutoff=0.6)]
    matches = get_close_matches(name, begins, n=1, cutoff=0.0) or get_close_matches(name, alike, n=1, cutoff=0.6)
    return matches[0] if matches else None


GUESS = "did you mean"  # a fix that begins so offers the nearest known name


def did_you_mean(name: str, known: Sequence[str] | Mapping[str, object], *, listed: bool = False) -> str:
    """Return the fix for a wrong name: the nearest known one, or all known names when they are few and the problem has not
    ``listed`` them."""
    guess = nearest(name, known)
    if guess:
        return f"{GUESS} {guess}?"
    if listed:
        return ""
    names = sorted(known)
    return f"known: {', '.join(names)}" if len(names) <= 30 else ""
