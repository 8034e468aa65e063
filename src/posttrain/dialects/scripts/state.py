"""State of a shell script while it is read: variables, positional arguments, the current folder, and the found commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from os.path import normpath
from pathlib import Path
from typing import Any

from posttrain.dialects.scripts.limits import MAX_STATEMENTS, check_length, too_much

Node = Any  # tree_sitter.Node; the package is imported when a script is parsed
Value = str | dict[str, str]  # an array is a dict with its indices as text

HOLE = re.compile("\0(\\d+)\0")


@dataclass(frozen=True, slots=True)
class Hole:
    """A part of a word that reading the script cannot resolve."""

    what: str  # "$MODEL_PATH of line 12 is not set"
    fix: str
    unset: str = ""  # the variable that is not set, which is empty in a shell
    program: str = ""  # the program whose output it is
    carrier: str = ""  # the variable that brought it into the word

    @property
    def name(self) -> str:
        """The text that may stand for it where any text may stand; "" where none is known."""
        if self.unset.isdigit():
            return f"argument_{self.unset}"
        return self.unset or (f"output_of_{self.program}" if self.program else self.carrier)


@dataclass(frozen=True, slots=True)
class Call:
    """A command of the script after all expansions; holes are marked inside the words."""

    words: tuple[str, ...]
    line: int
    last_line: int
    folder: Path  # the current folder of the script at this line
    script: Path  # the file that the line stands in


class Leave(Exception):
    """Control flow of the script: exit, return, break or continue."""

    def __init__(self, kind: str, status: bool | None = True, levels: int = 1):
        super().__init__(kind)
        self.kind = kind
        self.status = status  # of exit and return: success, or None where it is not known
        self.levels = levels  # of loops that break or continue leaves


@dataclass(slots=True)
class Shell:
    """A script's variables and results.

    ``variables`` holds what the script and the environment set. ``run_program`` answers for a program whose output is known
    without running it; ``substitute`` is the reader of ``$(...)`` and ``follow`` that of a statement.
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
    piped: str | None = None  # the standard input of a command in a pipeline, or behind <<<
    depth: int = 0
    line_offset: int = 0  # of a text that is parsed apart from its file
    ended: str = ""  # file:line of an exit that was reached; "": none
    exported: set[str] = field(default_factory=set)  # what a script that this one calls receives
    exports_all: bool = False  # set -a
    integers: set[str] = field(default_factory=set)  # declare -i
    associative: set[str] = field(default_factory=set)  # declare -A
    # A function's own names, with their outer values.
    locals: list[dict[str, Value | None]] = field(default_factory=list)
    # Of each function: its names for other variables (local -n), which get their values when it ends
    references: list[dict[str, str]] = field(default_factory=list)
    within: list[Path] = field(default_factory=list)  # the scripts that called this one
    given: dict[str, str] = field(default_factory=dict)  # --set NAME=VALUE, for values that the script leaves open
    read: set[str] = field(default_factory=set)  # names of the parameters that were expanded
    carriers: dict[int, str] = field(
        default_factory=dict
    )  # the variable that last carried a hole, by the hole's number
    # A guard is a branch that ends the script, such as `if [ $# -lt 2 ]; then exit 1; fi`.
    passes_guards: bool = False  # read on behind them
    guards: list[str] = field(default_factory=list)  # the file and line of those that were passed
    remarks: list[str] = field(default_factory=list)  # for the user: where a shell would read the script otherwise
    written: dict[Path, int] = field(default_factory=dict)  # files that the script writes, and the line
    statements: int = 0  # followed so far
    substitute: Callable[[Shell, Node], str] = lambda shell, node: ""
    follow: Callable[[Shell, Node], bool | None] = lambda shell, node: None

    def hole(self, what: str, fix: str, *, unset: str = "", program: str = "") -> str:
        """Mark an unresolved part. Returns: the mark, which stands in the word."""
        self.holes.append(Hole(what, fix, unset, program))
        return f"\0{len(self.holes) - 1}\0"

    def path(self, text: str) -> Path:
        """The path that a word means in the script's current folder; ``~`` is the script's $HOME."""
        home = self.variables.get("HOME")
        if re.match(r"~(/|$)", text) and isinstance(home, str):
            text = home + text[1:]
        return self.folder / text

    def passes(self, left: Leave) -> bool:
        """Return True where an ``exit`` in a branch, or in a function that fails, is a guard that this reading passes."""
        if left.kind != "exit" or not self.passes_guards:
            return False
        self.guards.append(self.ended)
        self.ended = ""
        return True

    def enter(self, text: str) -> None:
        """``cd``: the folder of the statements that follow."""
        self.folder = Path(normpath(self.path(text)))
        self.variables["PWD"] = str(self.folder)

    def line(self, node: Node) -> int:
        return int(node.start_point[0]) + 1 + self.line_offset

    def bounded(self, text: str, line: int) -> str:
        """The text. Raises: ConfigError for one that is longer than an argument can be."""
        return check_length(text, self.script, line)

    def count_statement(self, node: Node) -> None:
        self.statements += 1
        if self.statements > MAX_STATEMENTS:
            raise too_much(f"the turns of the loops: {MAX_STATEMENTS} statements", self.script, self.line(node))

    def as_tested(self, text: str) -> str | None:
        """The text as a condition sees it: an unset variable is empty. Returns None where a part is unknown."""
        found = [self.holes[int(number)] for number in HOLE.findall(text)]
        return None if any(not hole.unset for hole in found) else HOLE.sub("", text)

    def holes_of(self, text: str) -> list[Hole]:
        return [self.hole_of(int(number)) for number in HOLE.findall(text)]

    def hole_of(self, number: int) -> Hole:
        """A hole by its number. Its fix names the variable that carries it: ``--set`` gives that one a value."""
        hole, carrier = self.holes[number], self.carriers.get(number)
        if hole.unset or carrier is None:
            return hole
        return replace(hole, carrier=carrier, fix=f"--set {carrier}=VALUE, or {hole.fix}")


def new_shell(
    script: Path, arguments: list[str], environment: Mapping[str, str], given: Mapping[str, str] | None = None
) -> Shell:
    """The state at the first line of a script that is started in the current folder.

    Args: ``given`` are values of variables, and of its first arguments by their numbers, that win over unknown ones.
    """
    named = {name: value for name, value in (given or {}).items() if not name.isdigit()}
    variables: dict[str, Value] = {**environment, "PWD": str(Path.cwd()), **named}
    shell = Shell(
        script=script,
        folder=Path.cwd(),
        variables=variables,
        positional=list(arguments),
        exported={*environment, "PWD", *named},
        within=[script],
        given=named,
    )
    numbered = {int(name): value for name, value in (given or {}).items() if name.isdigit()}
    places = range(1, max(numbered, default=0) + 1)
    shell.read_arguments |= set(numbered.values())
    before = [numbered[place] if place in numbered else not_given(shell, str(place), 1) for place in places]
    shell.positional[:0] = before
    return shell


def not_given(shell: Shell, name: str, line: int) -> str:
    """Mark an argument of the script that is not given, or a variable that is not set; it is empty in a shell."""
    if name.isdigit():
        return shell.hole(f"${name} of line {line} is not given", f"--set {name}=...", unset=name)
    return shell.hole(f"${name} of line {line} is not set", f"--set {name}=..., or export it", unset=name)
