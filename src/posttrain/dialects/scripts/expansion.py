"""Expansion of a word of the shell: quotes, parameters, arithmetic, substitution, braces, splitting, file patterns."""

from __future__ import annotations

import re
from collections.abc import Callable
from glob import glob
from pathlib import Path

from posttrain.dialects.scripts.arithmetic import arithmetic
from posttrain.dialects.scripts.limits import MAX_WORDS, too_much
from posttrain.dialects.scripts.parameters import parameter
from posttrain.dialects.scripts.state import HOLE, Node, Shell
from posttrain.errors import ConfigError

Piece = tuple[str, bool]  # a text, and True where it was quoted


class Expanded(str):
    """A value that took a parameter's place: its braces stay, for braces are expanded first."""


BREAK: Piece = ("\n\n", True)  # between two items of "$@" or "${array[@]}"
EMPTY: Piece = ("", False)  # of "$@" without items


def source(node: Node) -> str:
    return str(node.text.decode("utf-8", errors="replace"))


def text_of(shell: Shell, node: Node) -> str:
    """Expand a word to one text, as in an assignment."""
    text = "".join(" " if piece is BREAK else piece[0] for piece in _home(shell, pieces(shell, node)))
    return shell.bounded(text, shell.line(node))


def pattern_of(shell: Shell, node: Node) -> str | None:
    """Expand a word to a pattern, whose quoted characters stand for themselves; None for an extended form."""
    found = _home(shell, pieces(shell, node))
    if any(not quoted and re.search(r"[@!+?*]\(|\[[!^]?\[:", text) for text, quoted in found):
        return None
    return "".join(re.sub(r"([*?[])", r"[\1]", text) if quoted else text.replace("[^", "[!") for text, quoted in found)


def words_of(shell: Shell, node: Node) -> list[str]:
    """Expand an argument to the words that a program receives."""
    found: list[str] = []
    given = _home(shell, pieces(shell, node))
    shell.bounded("".join(text for text, _ in given), shell.line(node))
    for alternative in _braces(given, lambda: too_much("the words that braces make", shell.script, shell.line(node))):
        for word in _split(shell, alternative):
            found.extend(_files(shell, word))
    return found


def pieces(shell: Shell, node: Node) -> list[Piece]:
    """The parts of a word."""
    kind = node.type
    if kind in ("concatenation", "command_name"):
        return [piece for child in node.children for piece in pieces(shell, child)]
    if kind == "raw_string":
        return [(source(node)[1:-1], True)]
    if kind == "ansi_c_string":
        return [(_escapes(source(node)[2:-1]), True)]
    if kind in ("string", "translated_string"):
        return _quoted(shell, node)
    if kind in ("simple_expansion", "expansion"):
        return _parameter(shell, node, quoted=False)
    if kind == "arithmetic_expansion":
        text = source(node)
        inside = text[3:-2] if text.startswith("$((") else text[2:-1]  # $[...] is the old form
        return [(arithmetic(shell, inside, shell.line(node)), True)]
    if kind == "command_substitution":
        return [(Expanded(shell.substitute(shell, node)), False)]
    if kind == "process_substitution":
        what = f"{source(node)} of line {shell.line(node)} is the output of a program"
        return [(shell.hole(what, "write its value into the script"), True)]
    if kind == "subscript":
        return [(source(node), True)]
    return _plain(source(node))


def _plain(text: str) -> list[Piece]:
    """A bare word; a backslash quotes the character behind it, and joins two lines."""
    found: list[Piece] = []
    for part in re.findall(r"\\.|[^\\]+|\\$", text, re.DOTALL):
        if part.startswith("\\"):
            if part != "\\\n":
                found.append((part[1:] or part, True))
        else:
            found.append((part, False))
    return found


def _quoted(shell: Shell, node: Node) -> list[Piece]:
    """A text between double quotes. Blanks between its parts are not nodes of their own, so the bytes are what counts."""
    found: list[Piece] = [("", True)]
    data: bytes = node.text
    begin = node.start_byte
    place = data.index(b'"') + 1
    end = len(data) - 1

    def literal(until: int) -> None:
        text = data[place:until].decode("utf-8", errors="replace")
        found.append((re.sub(r'\\(\n|["\\$`])', lambda m: "" if m[1] == "\n" else m[1], text), True))

    for child in node.named_children:
        if child.type == "string_content":
            continue
        # Behind the end of a line the parser takes blanks for a part of the parameter.
        blanks = max(child.text.find(b"$"), 0) if child.type in ("simple_expansion", "expansion") else 0
        literal(child.start_byte - begin + blanks)
        place = child.end_byte - begin
        if child.type in ("simple_expansion", "expansion"):
            found.extend(_parameter(shell, child, quoted=True))
        else:
            found.extend((text, True) for text, _ in pieces(shell, child))
    literal(end)
    # "$@" without arguments is no word at all.
    nothing = any(piece is EMPTY for piece in found) and not any(text for text, _ in found)
    return [EMPTY] if nothing else found


def _parameter(shell: Shell, node: Node, *, quoted: bool) -> list[Piece]:
    text = source(node)
    text = text[max(text.find("$"), 0) :]
    inside = text[2:-1] if text.startswith("${") else text[1:]
    value = parameter(
        shell, inside, shell.line(node), lambda word: operand(shell, word, shell.line(node), quoted=quoted)
    )
    if isinstance(value, str):
        return [(Expanded(value), quoted)]
    found: list[Piece] = []
    for number, item in enumerate(map(Expanded, value)):
        found.extend([BREAK, (item, quoted)] if number else [(item, quoted)])
    return found if found else [("", False)] if not quoted else [EMPTY]


def operand(shell: Shell, word: str, line: int, *, quoted: bool = False) -> str:
    """Expand a default or a pattern inside ``${...}``; between double quotes single ones are characters of it."""
    if quoted and '"' not in word and "'" in word:
        word = f'"{word}"'
    if not re.search(r"[$`\"'\\]", word):
        return word
    from posttrain.dialects.scripts.parsing import parse

    root = parse(f": {word}")
    kept, shell.line_offset = shell.line_offset, line - 1
    try:
        if not root.named_children or root.named_children[0].type != "command":
            return word
        return " ".join(text_of(shell, child) for child in root.named_children[0].named_children[1:])
    finally:
        shell.line_offset = kept


def _home(shell: Shell, found: list[Piece]) -> list[Piece]:
    if found and not found[0][1] and re.match(r"~(/|$)", found[0][0]):
        return [(str(shell.path("~")) + found[0][0][1:], True), *found[1:]]
    return found


def _braces(found: list[Piece], too_many: Callable[[], ConfigError]) -> list[list[Piece]]:
    """``{a,b}`` and ``{1..3}`` outside of quotes give one word each. Raises: ``too_many`` beyond MAX_WORDS."""
    apart = enumerate((text, quoted or isinstance(text, Expanded)) for text, quoted in found)
    marked = "".join(f"\1{number}\1" if whole else text for number, (text, whole) in apart)
    group = re.search(r"\{([^{}\s]*,[^{}\s]*|-?\d+\.\.-?\d+)\}", marked)
    if group is None:
        return [found]
    inner = group[1]
    if "," in inner:
        options = inner.split(",")
    else:
        first, last = (int(number) for number in inner.split(".."))
        if abs(last - first) >= MAX_WORDS:
            raise too_many()
        options = [
            str(number) for number in range(first, last + 1 if last >= first else last - 1, 1 if last >= first else -1)
        ]
    words: list[list[Piece]] = []
    for option in options:
        if len(words) > MAX_WORDS:
            raise too_many()
        text = marked[: group.start()] + option + marked[group.end() :]
        parts = re.split("\1(\\d+)\1", text)
        again = [found[int(part)] if place % 2 else (part, False) for place, part in enumerate(parts)]
        words.extend(_braces([piece for piece in again if piece[0] or piece[1]], too_many))
    return words


def _split(shell: Shell, found: list[Piece]) -> list[list[Piece]]:
    """Split unquoted expansions at blanks, and at the items of an array."""
    words: list[list[Piece]] = []
    current: list[Piece] = []
    separators = shell.variables.get("IFS", " \t\n")
    separators = separators if isinstance(separators, str) else " \t\n"
    spaces = re.escape("".join(mark for mark in separators if mark.isspace()))
    marks = re.escape("".join(mark for mark in separators if not mark.isspace()))
    either = [f"[{spaces}]+"] if spaces else []
    either = [f"[{spaces}]*[{marks}][{spaces}]*" if spaces else f"[{marks}]", *either] if marks else either
    blank = "|".join(either) or "(?!)"
    for piece in found:
        if piece is BREAK:
            words.append(current)
            current = []
            continue
        text, quoted = piece
        if quoted:
            current.append(piece)
            continue
        parts = re.split(blank, text)
        for number, part in enumerate(parts):
            if number:
                inner = marks and number < len(parts) - 1 and not part  # a,,b has an empty item
                words.append(current)
                current = [("", True)] if inner else []
            if part:
                current.append((part, False))
    words.append(current)
    return [word for word in words if word]


def _files(shell: Shell, word: list[Piece]) -> list[str]:
    """The word, or the files that its unquoted pattern matches."""
    text = "".join(part for part, _ in word)
    if not HOLE.search(f"{text}{shell.folder}") and any(
        not quoted and re.search(r"[*?]", part) for part, quoted in word
    ):
        place = Path(text).expanduser()
        matches = sorted(glob(text, root_dir=None if place.is_absolute() else shell.folder))
        return matches or [text]
    return [text]


def _escapes(text: str) -> str:
    known = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"', "r": "\r"}
    return re.sub(r"\\(.)", lambda found: known.get(found[1], found[0]), text)
