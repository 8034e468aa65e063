"""Bounds on the reading of a script: statements, words and their lengths. Each is one error that names file and line."""

from __future__ import annotations

from pathlib import Path

from posttrain.errors import ConfigError, Problem

MAX_TURNS = 1000  # of a loop that is followed
MAX_STATEMENTS = 50_000  # of a script, all turns of its loops counted
MAX_DEPTH = 40  # of functions and of scripts that call each other
MAX_WORDS = 10_000  # of one command
MAX_LENGTH = 128 * 1024  # characters of a text: Linux passes no longer argument (MAX_ARG_STRLEN)


def too_much(what: str, script: Path, line: int) -> ConfigError:
    """The error of a script that is larger than a launch script can be."""
    fix = "write the trainer's command out, or its keys into a file"
    return ConfigError(
        Problem(f"{what} are more than the reader of scripts follows", where=f"{script}:{line}", fix=fix)
    )


def check_length(text: str, script: Path, line: int) -> str:
    if len(text) > MAX_LENGTH:
        raise too_much(f"a text of more than {MAX_LENGTH} characters: these", script, line)
    return text
