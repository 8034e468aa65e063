"""``read`` of a text that the script holds: ``IFS=, read -r -a LIST <<< "$TEXT"``."""

from __future__ import annotations

import re

from posttrain.dialects.scripts.state import HOLE, Shell

_BLANKS = " \t\n"


def given_line(shell: Shell) -> str | None:
    """Return the line that a command reads; None where only a run of the script tells it."""
    if shell.piped is None or HOLE.search(shell.piped):
        return None
    return shell.piped.partition("\n")[0]


def taken(shell: Shell, words: list[str], line: str) -> bool:
    """Assign the fields of a line to the variables of ``read``; False, with nothing assigned, for options that are not read."""
    array, names = "", []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if re.fullmatch(r"-r?a", word) and rest:
            array = rest.pop(0)
        elif word.startswith("-") and word != "-r":
            return False
        elif not word.startswith("-"):
            names.append(word)
    if not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in (array or "a", *names)) or (array and names):
        return False
    separators = shell.variables.get("IFS", _BLANKS)
    if not isinstance(separators, str) or HOLE.search(separators):
        return False
    if array:
        fields = _fields(line, separators, 0)
        shell.variables[array] = {str(place): field for place, field in enumerate(fields)}
        return True
    names = names or ["REPLY"]
    fields = _fields(line, separators, len(names))
    for place, name in enumerate(names):
        shell.variables[name] = fields[place] if place < len(fields) else ""
    return True


def _fields(line: str, separators: str, most: int) -> list[str]:
    """Split a line as the shell does: at runs of blanks among the separators, at every other one. ``most`` fields, the last of
    which is the rest of the line; 0: all."""
    blanks = "".join(each for each in separators if each in _BLANKS)
    others = "".join(each for each in separators if each not in _BLANKS)
    line = line.strip(blanks) if blanks else line
    if not line or not separators:
        return [line] if line else []
    patterns = (
        [f"[{re.escape(blanks)}]*[{re.escape(others)}][{re.escape(blanks)}]*" if blanks else f"[{re.escape(others)}]"]
        if others
        else []
    )
    patterns += [f"[{re.escape(blanks)}]+"] if blanks else []
    pattern = "|".join(patterns)
    fields = re.split(pattern, line, maxsplit=max(most - 1, 0)) if most != 1 else [line]
    # A separator at the end closes the last field and begins none
    last = re.split(pattern, fields[-1])
    if len(last) == 2 and last[1] == "":
        fields[-1] = last[0]
    return fields[:-1] if fields[-1] == "" and not most else fields
