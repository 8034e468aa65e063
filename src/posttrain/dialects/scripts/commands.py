"""Simple commands: the shell's own, functions, scripts that a script calls, and programs, which are recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.dialects.scripts.arithmetic import computed
from posttrain.dialects.scripts.assignments import assign, declare_word, put, restored, unset
from posttrain.dialects.scripts.conditions import Truth, of_words
from posttrain.dialects.scripts.control import body, subshell
from posttrain.dialects.scripts.expansion import text_of, words_of
from posttrain.dialects.scripts.filters import filtered
from posttrain.dialects.scripts.limits import MAX_DEPTH, MAX_WORDS, too_much
from posttrain.dialects.scripts.parsing import parse
from posttrain.dialects.scripts.programs import formatted, output_of
from posttrain.dialects.scripts.read_lines import given_line, taken
from posttrain.dialects.scripts.state import HOLE, Call, Leave, Node, Shell, Value
from posttrain.errors import ConfigError, Problem
from posttrain.registry import is_installed

_SHELLS = ("bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash")
# Programs that run a command with other variables than the script's.
_AWAY = ("ssh", "docker", "podman", "kubectl", "singularity", "apptainer")
_WRITE = "write its value into the script, or set the key behind the script: KEY=VALUE"


def run_text(shell: Shell, text: str) -> Truth:
    """Read a script's text. Returns: its exit status as a truth; an ``exit`` leaves as Leave."""
    return body(shell, parse(text, shell.script, shell.line_offset).children)


def command(shell: Shell, node: Node) -> Truth:
    _assignments(shell, node)
    words = [word for child in _arguments(node) for word in words_of(shell, child)]
    given = [child for child in node.named_children if child.type == "variable_assignment"]
    if len(words) > MAX_WORDS:
        raise too_much(f"{len(words)} words of one command", shell.script, shell.line(node))
    if not words:
        for child in given:
            assign(shell, child)
        return True
    typed = [child for child in node.named_children if child.type == "herestring_redirect"]
    before = shell.piped
    if typed and typed[-1].named_children:
        shell.piped = f"{text_of(shell, typed[-1].named_children[0])}\n"
    try:
        return _with_its_own(shell, given, words, node)
    finally:
        shell.piped = before


def _with_its_own(shell: Shell, given: list[Node], words: list[str], node: Node) -> Truth:
    """Run a command with the variables that stand before it, for it alone."""
    if not given:
        return _called(shell, words, node)
    kept = dict(shell.variables), set(shell.exported)
    names = {assign(shell, child) for child in given}
    shell.exported |= names
    try:
        return _called(shell, words, node)
    finally:
        for name in names:
            restored(shell, {name: kept[0].get(name)})
        shell.exported = kept[1] | (shell.exported - names)


def _arguments(node: Node) -> list[Node]:
    apart = ("variable_assignment", "file_redirect", "herestring_redirect", "heredoc_redirect", "comment")
    return [child for child in node.named_children if child.type not in apart]


def _assignments(shell: Shell, node: Node) -> None:
    """Assign what stands before a command on lines of its own; the grammar takes ``A=1 B=2`` for part of the next line."""
    given = [child for child in node.named_children if child.type == "variable_assignment"]
    name = node.child_by_field_name("name")
    if not given or name is None:
        return
    between = node.text[given[-1].end_byte - node.start_byte : name.start_byte - node.start_byte]
    if re.search(rb"(?<!\\)\n", between):
        for child in given:
            assign(shell, child)


def _called(shell: Shell, words: list[str], node: Node) -> Truth:
    name, *rest = words
    match name:
        case "exit":
            shell.ended = f"{shell.script}:{shell.line(node)}"
            raise Leave("exit", not rest or rest[0] == "0")
        case "return":
            raise Leave("return", None if not rest or not rest[0].isdigit() else rest[0] == "0")
        case "break" | "continue":
            raise Leave(name, levels=int(rest[0]) if rest and rest[0].isdigit() else 1)
        case "shift":
            count = int(rest[0]) if rest and rest[0].isdigit() else 1
            if count > len(shell.positional):
                return False
            del shell.positional[:count]
        case "set":
            _set(shell, rest)
        case "cd" if rest:
            shell.enter(rest[-1])
        case "export" | "local" | "declare" | "readonly" | "typeset":
            flags = "".join(word[1:] for word in rest if word.startswith("-"))
            for word in rest:
                declare_word(shell, name, flags, word)
        case "unset":
            unset(shell, rest)
        case "let":
            numbers = [computed(shell, word) for word in rest]
            return None if not numbers or numbers[-1] is None else bool(numbers[-1])
        case "read" if (line := given_line(shell)) is not None and taken(shell, rest, line):
            return True
        case "read" | "mapfile" | "readarray" | "getopts":
            _asked(shell, name, rest, node)
            return None
        case "test" | "[":
            return of_words(shell, rest[:-1] if name == "[" and rest[-1:] == ["]"] else rest)
        case "true" | ":":
            return True
        case "false":
            return False
        case "printf" if rest[:1] == ["-v"] and len(rest) > 2:
            said = formatted(rest[2:])
            what = f"printf -v {rest[1]} of line {shell.line(node)} has a format that is not read"
            put(
                shell,
                rest[1],
                said if said is not None else shell.hole(what, f"set {rest[1]} itself"),
                line=shell.line(node),
            )
        case "source" | ".":
            return _sourced(shell, rest, node)
        case "eval":
            return _nested(shell, " ".join(rest), node)
        case _ if name in shell.functions:
            return _function(shell, name, rest, node)
        case _:
            return _program(shell, words, node)
    return True


def _set(shell: Shell, rest: list[str]) -> None:
    if "--" in rest:
        shell.positional[:] = rest[rest.index("--") + 1 :]
        return
    for place, word in enumerate(rest):
        if re.fullmatch(r"[-+]\w*a\w*", word) or (
            word in ("-o", "+o") and rest[place + 1 : place + 2] == ["allexport"]
        ):
            shell.exports_all = word.startswith("-")
    if rest and not rest[0].startswith(("-", "+")):
        shell.positional[:] = rest


def _asked(shell: Shell, name: str, rest: list[str], node: Node) -> None:
    """``read`` and its kin: the variables that they set are unknown."""
    names = [word for word in rest if re.fullmatch(r"[A-Za-z_]\w*", word)]
    names += {"read": ["REPLY"], "getopts": ["OPTARG", "OPTIND"]}.get(name, ["MAPFILE"])
    for word in names:
        shell.variables[word] = shell.hole(f"{name} of line {shell.line(node)} asks for {word}", f"set {word}")


def _program(shell: Shell, words: list[str], node: Node) -> Truth:
    inner = next((place for place, word in enumerate(words) if word in _SHELLS), None)
    if inner is not None and words[0] not in _AWAY:
        rest = words[inner + 1 :]
        if rest and re.fullmatch(r"-[a-z]*c", rest[0]) and len(rest) > 1:
            return _child(shell, rest[1], rest[3:], node, None)
        rest = [
            word
            for place, word in enumerate(rest)
            if not re.fullmatch(r"-[a-z]+", word) or any(not each.startswith("-") for each in rest[:place])
        ]
        file = _script(shell, rest[0]) if rest and shell.as_tested(rest[0]) else None
        if file is not None:
            with _given_by_env(shell, words[:inner]):
                return _child(shell, _text_of_file(file), rest[1:], node, file)
    elif words[0].endswith(".sh") and "/" in words[0] and (file := _script(shell, words[0])) is not None:
        return _child(shell, _text_of_file(file), words[1:], node, file)
    if (library := _imported(words)) is not None:
        return is_installed(library)
    last_line = int(node.end_point[0]) + 1 + shell.line_offset
    shell.calls.append(Call(tuple(words), shell.line(node), last_line, shell.folder, shell.script))
    said = output_of(shell, words)
    status: Truth = None if said is None else True
    if said is None and shell.piped is not None and shell.as_tested(shell.piped) == shell.piped:
        said, status = filtered(words, shell.piped) or (None, None)
    if shell.output is not None:
        shell.output.append(said if said is not None else _unknown_output(shell, words, node))
    if words[0] == "exec" and len(words) > 1:
        raise Leave("exit")
    return status


@contextmanager
def _given_by_env(shell: Shell, words: list[str]) -> Iterator[None]:
    """The variables of ``nohup env NAME=VALUE ...`` before a command, for it alone."""
    behind = words[words.index("env") + 1 :] if "env" in words else []
    given = dict(word.split("=", 1) for word in behind if re.match(r"[A-Za-z_]\w*=", word))
    kept = {name: shell.variables.get(name) for name in given}, set(shell.exported)
    shell.variables |= given
    shell.exported |= set(given)
    try:
        yield
    finally:
        restored(shell, kept[0])
        shell.exported = kept[1] | (shell.exported - set(given))


def _script(shell: Shell, word: str) -> Path | None:
    """The file of a script that is called; a relative one may stand below a folder above the calling script, which its users
    start in, and an absolute one in this checkout, where that is not there. None where there is none."""
    above = (Path.cwd() / shell.script).resolve().parents
    if not Path(word).is_absolute():
        return next((file for file in (shell.path(word), *(folder / word for folder in above)) if file.is_file()), None)
    if Path(word).is_file():
        return Path(word)
    # A checkout that stands elsewhere on the machine of the script: its file, by the end of the path
    parts = Path(word).parts[1:]
    tails = (Path(*parts[start:]) for start in range(len(parts)))
    found = next((folder / tail for tail in tails for folder in above if (folder / tail).is_file()), None)
    if found is not None:
        shell.remarks.append(f"{HOLE.sub('...', word)} is not here; {found} is read in its place")
    return found


def _imported(words: list[str]) -> str | None:
    """The library that ``python3 -c 'import NAME'`` looks for, whose status tells whether it is installed; None for another
    command."""
    match words:
        case ["python" | "python3", "-c", text] if found := re.fullmatch(r"\s*import (\w+)\s*", text):
            return found[1]
    return None


def _text_of_file(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def name_of_program(word: str) -> str:
    """The program's name as a text that may stand in a path."""
    return re.sub(r"\W", "", word.rpartition("/")[2]) or "program"


def _unknown_output(shell: Shell, words: list[str], node: Node) -> str:
    what = f"$({words[0]} ...) of line {shell.line(node)} is the output of a program, and reading a script runs none"
    return shell.hole(what, _WRITE, program=name_of_program(words[0]))


def substitute(shell: Shell, node: Node) -> str:
    """The output of ``$(...)``, read in a shell of its own."""
    if b"get_device_name()" in node.text:  # verl's own question for the kind of accelerator
        return "cuda"
    kept, calls = shell.output, list(shell.calls)
    shell.output = []
    try:
        if re.match(r"\$\(\s*<", node.text.decode("utf-8", errors="replace")):  # $(< file)
            shell.output.append(shell.hole(f"$(< ...) of line {shell.line(node)} is the text of a file", _WRITE))
        with subshell(shell):
            body(shell, node.children)
    finally:
        said = "".join(shell.output)
        shell.output, shell.calls = kept, calls
    return shell.bounded(said.rstrip("\n"), shell.line(node))


def _nested(shell: Shell, text: str, node: Node) -> Truth:
    """Read the text of ``eval`` or ``bash -c``; its lines count from the command's own."""
    kept, shell.line_offset = shell.line_offset, shell.line(node) - 1
    try:
        with _Deeper(shell, shell.script, node):
            return run_text(shell, text)
    finally:
        shell.line_offset = kept


def _child(shell: Shell, text: str, arguments: list[str], node: Node, file: Path | None) -> Truth:
    """Read a script or a text that another shell runs, which receives the exported variables alone."""
    kept = shell.script, shell.line_offset, shell.locals
    status: Truth = None
    with subshell(shell):
        shell.variables = {name: value for name, value in shell.variables.items() if name in shell.exported}
        shell.positional, shell.functions, shell.locals = arguments, {}, []
        shell.line_offset = 0 if file else shell.line(node) - 1
        try:
            with _Deeper(shell, file or shell.script, node):
                shell.script = file or shell.script
                status = run_text(shell, text)
        except Leave as left:
            status = left.status
        finally:
            shell.script, shell.line_offset, shell.locals = kept
    return status


def _sourced(shell: Shell, rest: list[str], node: Node) -> Truth:
    if not rest or shell.as_tested(rest[0]) is None:
        return None
    file = _script(shell, rest[0]) if Path(rest[0]).is_absolute() else shell.path(rest[0])
    if file is None or not file.is_file():
        return None
    kept = shell.line_offset, shell.positional, shell.script
    if rest[1:]:
        shell.positional = rest[1:]
    try:
        with _Deeper(shell, file, node):
            shell.line_offset, shell.script = 0, file
            return run_text(shell, _text_of_file(file))
    except Leave as left:
        if left.kind != "return":
            raise
        return left.status
    finally:
        shell.line_offset, shell.script = kept[0], kept[2]
        if rest[1:]:
            shell.positional = kept[1]


def _function(shell: Shell, name: str, rest: list[str], node: Node) -> Truth:
    kept, shell.positional = shell.positional, rest
    outer: dict[str, Value | None] = {}
    shell.locals.append(outer)
    shell.references.append({})
    try:
        with _Deeper(shell, Path(f"{name}()"), node):
            return shell.follow(shell, shell.functions[name])
    except Leave as left:
        # die "there is no such file"
        if left.kind == "exit" and left.status is False and shell.passes(left):
            return None
        if left.kind != "return":
            raise
        return left.status
    finally:
        shell.positional = kept
        meant = {target: shell.variables.get(name) for name, target in shell.references.pop().items()}
        restored(shell, shell.locals.pop())
        restored(shell, meant)


class _Deeper:
    """One level of calls. Raises: ConfigError where they have no end."""

    def __init__(self, shell: Shell, callee: Path, node: Node):
        self.shell, self.callee, self.where = shell, callee, f"{shell.script}:{shell.line(node)}"

    def __enter__(self) -> None:
        self.shell.within.append(self.callee)
        if len(self.shell.within) <= MAX_DEPTH:
            return
        names = [each.name for each in self.shell.within]
        start = (
            max(place for place, name in enumerate(names[:-1]) if name == names[-1]) if names[-1] in names[:-1] else 0
        )
        what = f"{' calls '.join(names[start:])}: they call each other in a circle"
        raise ConfigError(Problem(what, where=self.where, fix="name the command that starts the trainer in one script"))

    def __exit__(self, *error: object) -> None:
        self.shell.within.pop()
