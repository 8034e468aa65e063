"""Conversion of errors to text and exit codes, in one place."""

from __future__ import annotations

import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from posttrain.errors import PosttrainError, RequestError, RunInterrupted, RunStopped
from posttrain.libraries.disk_errors import NO_PLACE, described, disk_error
from posttrain.run.early_stop import AT_ONCE, StoppedEarly, heard

if TYPE_CHECKING:
    from posttrain.dialects.loaded import LoadedConfig


def run_guarded(command: Callable[[], object]) -> int:
    """Run a command. Returns: the exit code.

    Errors that a user can fix are printed without a traceback. Any other error is a bug and keeps its traceback.
    """
    try:
        command()
    except PosttrainError as error:
        print(error_text(error, width=terminal_width()), file=sys.stderr)
        return error.exit_code
    except Exception as error:  # noqa: BLE001  # the boundary: every error that arrives here is reported
        found = disk_error(error)
        if found is None:
            return report_bug()
        print(_wrap(f"posttrain: {described(found)}", terminal_width()), file=sys.stderr)
        return RequestError.exit_code if found.errno in NO_PLACE else RunStopped.exit_code
    return 0


@contextmanager
def stopped_at_once(what: str = "stopped at once") -> Iterator[None]:
    """End a command with one line at Ctrl-C: a second one, or one before there is anything to save."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"posttrain: {what}", err=True)
        raise typer.Exit(AT_ONCE) from None


@contextmanager
def placed_by(loaded: LoadedConfig[Any]) -> Iterator[None]:
    """Add the places in the user's file to problems that are found only while data and model are read, and name the user's
    keys in the reason of a run that ends."""
    try:
        yield
    except RequestError as error:
        error.locate(loaded.locate)
        raise
    except (RunStopped, RunInterrupted) as error:
        error.args = (loaded.text(str(error)),)
        raise


def report_bug() -> int:
    """Print the traceback of the current error. Returns: the exit code.

    Raises: StoppedEarly when a signal asked for a stop: a library that was being imported or called has made an error of its own
        of the exception.
    """
    if name := heard():
        raise StoppedEarly(name)
    traceback.print_exc()
    print("\nThis is a bug in posttrain. Please report it with the lines above.", file=sys.stderr)
    return 1


def terminal_width() -> int:
    """Return the columns to wrap at: the terminal's, between 40 and 100; 80 without a terminal."""
    return max(40, min(100, shutil.get_terminal_size((80, 24)).columns))


def error_text(error: PosttrainError, width: int = 80) -> str:
    """Format an error for a terminal of ``width`` columns. Several problems are numbered. Paths and keys are not broken."""
    if not isinstance(error, RequestError):
        return _wrap(f"posttrain: {error}", width)
    texts = [str(problem) for problem in error.problems]
    if len(texts) == 1:
        return _wrap(f"posttrain: {texts[0]}", width)
    digits = len(str(len(texts)))
    numbered = [
        _wrap(f"{number:>{digits}}. {text}", width, indent=digits + 2) for number, text in enumerate(texts, start=1)
    ]
    return "\n".join([f"posttrain: {len(texts)} problems, and nothing was started:", *numbered])


def _wrap(text: str, width: int, indent: int = 0) -> str:
    """Fill each line of ``text`` to ``width``; indent the lines after the first."""
    lines = text.splitlines() or [""]
    wrapped = [
        textwrap.fill(
            line,
            width,
            initial_indent="" if number == 0 else " " * indent,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
        for number, line in enumerate(lines)
    ]
    return "\n".join(wrapped)
