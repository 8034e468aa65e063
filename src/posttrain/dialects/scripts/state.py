"""State of a shell script while it is read: variables, positional arguments, the current folder, and the found commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Node = Any  # tree_sitter.Node; the package is imported when a script is parsed
Value = str | dict[str, str]  # an array is a dict with its indices as text

HOLE = re.compile("\0(\\d+)\0")


@dataclass(frozen=True, slots=True)
class Hole:
    """A part of a word that reading the script cannot resolve."""

    what: str  # "$MODEL_PATH of line 12 is not set"
    fix: str
    unset: bool = False  # empty in a shell


@dataclass(frozen=True, slots=True)
class Call:
    """A command of the script after all expansions; holes are marked inside the words."""

    words: tuple[str, ...]
    line: int
    last_line: int
    folder: Path  # the current folder of the script at this line


class Leave(Exception):
    """Control flow of the script: exit, return, break or continue."""

    def __init__(self, kind: str, status: int = 0):
        super().__init__(kind)
        self.kind = kind
        self.status = status


@dataclass(slots=True)
class Shell:
    """A script's variables and results.

    ``variables`` holds what the script and the environment set. ``run_program`` answers for a program whose output is known
    without running it; ``substitute`` is the reader of ``$(...)``, set by the reader of statements.
    """

    script: Path
    folder: Path
    variables: dict[str, Value]
    positional: list[str]
    calls: list[Call] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)
    functions: dict[str, Node] = field(default_factory=dict)
    read_arguments: set[str] = field(default_factory=set)  # those read as $1, $2 ...
    output: list[str] | None = None  # the standard output, where it is captured
    depth: int = 0
    line_offset: int = 0  # of a text that is parsed apart from its file
    ended: int = 0  # the line of an exit that was reached; 0: none
    substitute: Callable[[Shell, Node], str] = lambda shell, node: ""

    def hole(self, what: str, fix: str, *, unset: bool = False) -> str:
        """Mark an unresolved part. Returns: the mark, which stands in the word."""
        self.holes.append(Hole(what, fix, unset))
        return f"\0{len(self.holes) - 1}\0"

    def path(self, text: str) -> Path:
        """The path that a word means in the script's current folder; ``~`` is the script's $HOME."""
        home = self.variables.get("HOME")
        if re.match(r"~(/|$)", text) and isinstance(home, str):
            text = home + text[1:]
        return self.folder / text

    def line(self, node: Node) -> int:
        return int(node.start_point[0]) + 1 + self.line_offset

    def as_tested(self, text: str) -> str | None:
        """The text as a condition sees it: an unset variable is empty. Returns None where a part is unknown."""
        found = [self.holes[int(number)] for number in HOLE.findall(text)]
        return None if any(not hole.unset for hole in found) else HOLE.sub("", text)

    def holes_of(self, text: str) -> list[Hole]:
        return [self.holes[int(number)] for number in HOLE.findall(text)]


def new_shell(script: Path, arguments: list[str], environment: Mapping[str, str]) -> Shell:
    """The state at the first line of a script that is started in the current folder."""
    variables: dict[str, Value] = {**environment, "PWD": str(Path.cwd())}
    return Shell(script=script, folder=Path.cwd(), variables=variables, positional=list(arguments))
