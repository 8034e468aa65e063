"""Parse a shell script with tree-sitter's grammar of bash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from posttrain.dialects.scripts.state import Node
from posttrain.errors import ConfigError, Problem

# A comment between backticks holds a remark between two continued lines; it expands to nothing.
_REMARK = re.compile(r"(?<!\\)`[ \t]*#[^`\n]*`")

_NAME = re.compile(rb"(?<=[^\s$\\(])\$([A-Za-z_]\w*|\d|#|\$)")
# An assignment whose value goes on without a blank: LIST=[a,\
_LOGICAL = re.compile(r"^[ \t]*(?:export[ \t]+)?[A-Za-z_]\w*=[^\s'\"]+\\\n(?:[^\s'\"]+\\\n)*[^\s'\"\\]*$", re.M)

# A word that goes on as a new one behind its line's end: KEY=10\ before 2>&1, whose number the grammar takes for a word
# A line of three commands or more in a pipe
_PIPES = re.compile(rb"[^|\n]\|[^|\n]+\|[^|\n]")
_REDIRECT = re.compile(r"(?<=[^\s\\])(?=\\\n[ \t]+\d+[<>])")


@cache
def _parser() -> Any:
    from tree_sitter import Language, Parser
    from tree_sitter_bash import language

    return Parser(Language(language()))


def parse(text: str, script: Path | None = None, offset: int = 0) -> Node:
    """Parse a script. Returns: the root of its syntax tree, whose lines are those of the text.

    The grammar (0.25) cuts ``http://$HOST:$PORT`` and ``run_$$`` behind a dollar sign and a word at a continued line, takes
    the 2 of ``2>&1`` behind one for a word, and reads lines behind ``a | b | c`` as words of c where one has a redirection, so
    all are written in a form that it reads: ``${PORT}``, ``${$}``, one line, a blank, a semicolon.

    Raises: ConfigError for a quote, a condition or a loop that is not closed, with its place in ``script``, whose lines begin
        behind ``offset``.
    """
    plain = _REMARK.sub(lambda found: " " * len(found[0].encode()), text)
    plain = _REDIRECT.sub(" ", _LOGICAL.sub(_joined, plain))
    data = plain.encode()
    root = _parser().parse(data).root_node
    if script is not None and root.has_error:
        _refuse_open_quotes(root, script, offset)
        _refuse_open_blocks(root, script, offset)
    verbatim = sorted(_verbatim(root))
    parts, place = [], 0
    for begin, end in [*verbatim, (len(data), len(data))]:
        if begin < place:
            continue
        parts += [_NAME.sub(rb"${\1}", data[place:begin]), data[begin:end]]
        place = end
    return _separated(b"".join(parts))


def _separated(data: bytes) -> Node:
    """The tree of a script with a semicolon behind each command that the grammar reads on over the end of its line."""
    root = _parser().parse(data).root_node
    while _PIPES.search(data) and (ends := sorted(set(_run_on(root, data)))):
        for end in reversed(ends):
            data = data[:end] + b";" + data[end:]
        root = _parser().parse(data).root_node
    return root


def _run_on(root: Node, data: bytes) -> Iterator[int]:
    """Yield the ends of words behind which a command continues in the next line without a backslash."""
    for node in _every(root):
        words = [each for each in node.named_children if each.type != "comment"] if node.type == "command" else []
        for word, following in pairwise(words):
            between = data[word.end_byte : following.start_byte]
            if word.type != "variable_assignment" and re.search(rb"(?<!\\)\n", between):
                yield word.end_byte
                break


def _refuse_open_quotes(root: Node, script: Path, offset: int) -> None:
    for node in _every(root):
        broken = node.type == "ERROR" and node.text[:1] in (b"'", b'"')
        lone = node.type in ("'", '"') and node.parent is not None and node.parent.type == "ERROR"
        missing = node.is_missing and node.type in ("'", '"')
        if (broken or lone or missing) and b"`" not in (node.parent or node).text:
            begins = node.parent if missing and node.parent is not None else node
            what = f"the quote that opens at line {begins.start_point[0] + 1 + offset} is not closed"
            where = f"{script}:{begins.start_point[0] + 1 + offset}"
            raise ConfigError(Problem(what, where=where, fix="close it; a shell does not run the command either"))


def _refuse_open_blocks(root: Node, script: Path, offset: int) -> None:
    """Refuse an ``if``, a loop or a ``case`` without its end."""
    for node in _every(root):
        if node.is_missing and node.type in ("fi", "done", "esac") and node.parent is not None:
            begins = node.parent if node.parent.type != "do_group" else node.parent.parent or node.parent
            line = begins.start_point[0] + 1 + offset
            what = f"the {begins.children[0].type} of line {line} is not closed"
            fix = f"close it with {node.type}; a shell does not run the script either"
            raise ConfigError(Problem(what, where=f"{script}:{line}", fix=fix))


def _every(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        waiting.extend(reversed(each.children))


def _joined(found: re.Match[str]) -> str:
    """One line of a word that is continued over several; the lines that are saved follow it."""
    return found[0].replace("\\\n", "") + "\n" * found[0].count("\\\n")


def _verbatim(node: Node) -> Iterator[tuple[int, int]]:
    """The bytes that expand nothing: comments and texts between single quotes."""
    for child in node.children:
        if child.type in ("raw_string", "ansi_c_string", "comment"):
            yield child.start_byte, child.end_byte
        else:
            yield from _verbatim(child)
