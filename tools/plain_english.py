"""Report prose that is hard to grep or to read once: `python tools/plain_english.py [PATH ...]`, part of `make lint`.

Rules (CONTRIBUTING.md, "Plain English"):
  opener    the first line of a docstring names the thing or says in the imperative what it does; it does not open with
            a question word (What, Whether, How ...), a pronoun or a preposition, which make a clause or a fragment
  lower     the first line of a docstring opens with a capital letter, a name, a number or a formula
  word      no word or phrase of plain_english.toml in docstrings, comments, messages and documents
  trailing  a comment stands above a long line, not behind it

Prints path:line: rule: what is wrong. Exit code 1 when it printed anything.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = Path(__file__).with_suffix(".toml")

LONGEST_LINE_WITH_TRAILING_COMMENT = 100
LONGEST_CODE_BEFORE_COMMENT = 60


@dataclass(frozen=True)
class Finding:
    """A place where the prose breaks a rule."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Settings:
    """The file plain_english.toml: banned words, and the files to read."""

    openers: frozenset[str]
    lower_case_names: frozenset[str]
    instead: dict[str, str]
    source: tuple[str, ...]
    documents: tuple[str, ...]
    pending: tuple[str, ...]

    @classmethod
    def read(cls, path: Path = SETTINGS) -> Settings:
        """Read the settings file."""
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(
            openers=frozenset(table["openers"].split()),
            lower_case_names=frozenset(table["lower_case_names"].split()),
            instead=table["instead"],
            source=tuple(table["source"]),
            documents=tuple(table["documents"]),
            pending=tuple(table["pending"]),
        )


def check_python(text: str, path: str, settings: Settings) -> list[Finding]:
    """Check the docstrings, comments and messages of a Python file. Args: its source, and its name in findings."""
    tree = ast.parse(text)
    found = []
    docstrings = list(_docstrings(tree))
    for line, docstring in docstrings:
        found += _first_line(docstring, path, line, settings)
    prose = [(node.lineno, node.value) for node in ast.walk(tree) if _is_text(node)]
    lines = text.splitlines()
    comments = [
        token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    prose += _comment_blocks(comments)
    found += [finding for line, words in prose for finding in _banned(words, path, line, settings.instead)]
    found += [
        Finding(path, token.start[0], "trailing", "put the comment above the line, not behind it")
        for token in comments
        if _behind_a_long_line(token, lines[token.start[0] - 1])
    ]
    return found


def check_document(text: str, path: str, settings: Settings) -> list[Finding]:
    """Check the paragraphs of a Markdown file, without its code blocks and code spans."""
    found, paragraph, begin, fenced = [], [], 1, False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.lstrip().startswith("```"):
            fenced, line = not fenced, ""
        if line.strip() and not fenced:
            begin = begin if paragraph else number
            paragraph.append(re.sub(r"`[^`]*`", "`code`", line))
        elif paragraph:
            found += _banned("\n".join(paragraph), path, begin, settings.instead)
            paragraph = []
    return found


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of every docstring, those behind fields included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                documented = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
                if isinstance(text, str) and documented:
                    yield statement.lineno, text


def _first_line(docstring: str, path: str, line: int, settings: Settings) -> list[Finding]:
    """Check the opening of a docstring."""
    words = docstring.split()
    if not words:
        return []
    word = words[0].strip("`*\"'")
    plain = word.rstrip(".,:;")
    if plain in settings.openers:
        return [
            Finding(path, line, "opener", f"a docstring opens with {plain!r}: name the thing, or use the imperative")
        ]
    following = words[1] if len(words) > 1 else ""
    is_word = re.fullmatch(r"[a-z]{2,}", word) and not words[0].startswith("`")
    if is_word and word not in settings.lower_case_names and not re.match(r"[-+*/=<>(\[|^]", following):
        return [Finding(path, line, "lower", f"a docstring opens with {plain!r}: begin a sentence")]
    return []


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def _comment_blocks(comments: Iterable[tokenize.TokenInfo]) -> list[tuple[int, str]]:
    """Join the comments of consecutive lines, so that a phrase is found across a line break."""
    blocks: list[tuple[int, str]] = []
    last = -1
    for token in comments:
        line, text = token.start[0], token.string.lstrip("#")
        if line == last + 1:
            begin, before = blocks.pop()
            blocks.append((begin, f"{before}\n{text}"))
        else:
            blocks.append((line, text))
        last = line
    return blocks


def _banned(prose: str, path: str, begin: int, instead: dict[str, str]) -> Iterator[Finding]:
    for phrase, better in instead.items():
        pattern = r"\b" + phrase.replace(" ", r"\s+") + r"\b"
        for match in re.finditer(pattern, prose, re.IGNORECASE):
            line = begin + prose.count("\n", 0, match.start())
            shown = " ".join(match.group().split())
            yield Finding(path, line, "word", f"{shown!r}: write {better}")


def _behind_a_long_line(token: tokenize.TokenInfo, line: str) -> bool:
    code = line[: token.start[1]].rstrip()
    is_prose = not re.match(r"#\s*(noqa|type:|pragma|pyright|fmt:)", token.string)
    too_long = len(line) > LONGEST_LINE_WITH_TRAILING_COMMENT and len(code) > LONGEST_CODE_BEFORE_COMMENT
    return bool(code) and is_prose and too_long


def files_to_check(arguments: list[str], settings: Settings) -> list[Path]:
    """List the files named by the arguments, or those of the settings less the pending ones."""
    if arguments:
        roots = [Path(argument).resolve() for argument in arguments]
    else:
        roots = [ROOT / folder for folder in settings.source]
        roots += [document for pattern in settings.documents for document in sorted(ROOT.glob(pattern))]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*.py")))]
    pending = () if arguments else tuple(ROOT / path for path in settings.pending)
    return [file for file in files if not any(file.is_relative_to(path) for path in pending)]


def main(arguments: list[str]) -> int:
    """Check the files and print the findings. Returns: the exit code."""
    settings = Settings.read()
    count = 0
    for file in files_to_check(arguments, settings):
        check = check_python if file.suffix == ".py" else check_document
        path = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
        for finding in sorted(check(file.read_text(encoding="utf-8"), path, settings), key=lambda f: f.line):
            print(finding)
            count += 1
    if count:
        print(f"{count} findings; tools/plain_english.toml lists the words", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
