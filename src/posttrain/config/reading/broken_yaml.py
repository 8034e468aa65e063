"""Description of the errors in a file that is not YAML, in terms of what its writer sees."""

from __future__ import annotations

import re

import yaml

from posttrain.errors import Problem

_INDENT = "indent all keys of a section alike, with spaces"
# By the parser's words: what is wrong, and the fix. {0} is what the pattern captures, {line} where the piece begins.
_WORDS: tuple[tuple[str, str, str], ...] = (
    (r"could not determine a constructor for the tag (.+)", "tags such as {0} are not allowed here", "remove the tag"),
    (r"found another document", "a second document begins here", "keep one of them, in a file of its own"),
    (r"for merging, but found", "<< takes a section, or a list of sections", "write <<: *NAME, the name of an anchor"),
    (r"unhashable key", "a list or section stands in the place of a key", "keys are names"),
    (r"\\t", "lines are indented with spaces, and here is a tab", "replace it by spaces"),
    (r"mapping values are not allowed",
     "this line cannot hold a key: it is indented deeper than the line above, which has a value, or it holds two `: `",
     f"{_INDENT}, and put a text that holds `: ` in quotes"),
    (r"expected <block end>, but found '([\]}])'", "the {0} closes nothing", "put a text that holds it in quotes"),
    (r"expected <block end>", "this line is indented otherwise than its section, which begins on line {line}", _INDENT),
    (r"expected '<document start>'", "this line is indented otherwise than the lines above", _INDENT),
    (r"could not find expected ':'", "line {line} is no `key: value`", "put a colon and a blank after the key"),
    (r"expected ',' or '(.)'", "the list or mapping that opens on line {line} is not closed", "close it with {0}"),
    (r"unexpected end of stream", "the quote that opens on line {line} is not closed", "close it"),
    (r"found character '(.+)' that cannot start any token", "a value cannot begin with {0}", "put it in quotes"),
    (r"undefined alias '(.+)'", "*{0} refers to an undefined alias: no &{0} stands before it",
     "put a text that begins with * in quotes"),
    (r"unknown escape character '(.+)'", "\\{0} means nothing in double quotes", "write \\\\{0}, or use single quotes"),
)  # fmt: skip


def yaml_problem(error: yaml.MarkedYAMLError, file: str) -> Problem:
    """Say in one sentence what a parser complains about, with the line and the fix."""
    mark, begins = error.problem_mark or error.context_mark, error.context_mark or error.problem_mark
    where = f"{file}:{mark.line + 1}" if mark else file
    said = error.problem or error.context or "cannot be read"
    for pattern, what, fix in _WORDS:
        if found := re.search(pattern, said):
            line = begins.line + 1 if begins else 1
            if "line {line} is no" in what:  # the parser notices behind the place of the mistake
                where = f"{file}:{line}"
            what, fix = (text.format(*found.groups(), line=line) for text in (what, fix))
            return Problem(f"not valid YAML: {what}", where=where, fix=fix)
    return Problem(f"not valid YAML: {said}", where=where)
