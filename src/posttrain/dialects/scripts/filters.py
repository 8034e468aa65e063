"""Programs that read a text and write another, in a pipeline or behind ``<<<``: cut, tr, sed, grep, bc and the like."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from posttrain.dialects.scripts.calculations import calculated, in_bc

Said = tuple[str, bool]  # the standard output, and True for the exit status 0


def filtered(words: Sequence[str], text: str) -> Said | None:
    """Compute the output of a filter for its standard input; None for a program or an option that is not read here."""
    name, *rest = words
    program = _PROGRAMS.get("python3" if re.fullmatch(r".*/bin/python3?(\.\d+)?", name) else name)
    return None if program is None else program(rest, text)


def _cut(rest: list[str], text: str) -> Said | None:
    given = _options(rest, "dfc")
    if given is None or given[1] or ("f" in given[0]) == ("c" in given[0]):
        return None
    options = given[0]
    places = _places(options.get("f") or options.get("c", ""))
    if places is None:
        return None
    mark = options.get("d", "\t") if "f" in options else ""
    lines = []
    for line in text.splitlines():
        if mark and mark not in line:
            lines.append(line)
            continue
        parts = line.split(mark) if mark else list(line)
        lines.append(mark.join(part for number, part in enumerate(parts, 1) if places(number)))
    return _lines(lines), True


def _places(listed: str) -> Callable[[int], bool] | None:
    """``2``, ``1,3``, ``2-``, ``-3`` and ``2-4``."""
    ranges = []
    for each in listed.split(","):
        found = re.fullmatch(r"(\d*)(-?)(\d*)", each)
        if found is None or not (found[1] or found[3]):
            return None
        first = int(found[1] or 1)
        ranges.append((first, first if not found[2] else int(found[3]) if found[3] else 1 << 30))
    return lambda number: any(first <= number <= last for first, last in ranges)


def _tr(rest: list[str], text: str) -> Said | None:
    if rest[:1] == ["-d"] and len(rest) == 2 and (gone := _characters(rest[1])) is not None:
        return "".join(mark for mark in text if mark not in gone), True
    if len(rest) != 2 or rest[0].startswith("-"):
        return None
    old, new = _characters(rest[0]), _characters(rest[1])
    if old is None or not new:
        return None
    return text.translate(str.maketrans(old, (new + new[-1] * len(old))[: len(old)])), True


def _characters(written: str) -> str | None:
    """The characters of a set of ``tr``; None for a form that is not read."""
    classes = {"[:lower:]": "a-z", "[:upper:]": "A-Z", "[:digit:]": "0-9", "[:space:]": " \t\n", "[:blank:]": " \t"}
    for name, characters in classes.items():
        written = written.replace(name, characters)
    if "[" in written:
        return None
    written = written.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\")
    return re.sub(r"(.)-(.)", lambda found: "".join(map(chr, range(ord(found[1]), ord(found[2]) + 1))), written)


def _sed(rest: list[str], text: str) -> Said | None:
    """One substitution, ``s/a/b/`` with ``g``."""
    extended = rest[:1] in (["-E"], ["-r"])
    if extended or rest[:1] == ["-e"]:
        rest = rest[1:]
    if len(rest) != 1 or (found := re.fullmatch(r"s([/|#,:@])(.*)", rest[0], re.S)) is None:
        return None
    mark = re.escape(found[1])
    parts = re.fullmatch(rf"((?:\\.|(?!{mark}).)*){mark}((?:\\.|(?!{mark}).)*){mark}(g?)", found[2], re.S)
    if parts is None:
        return None
    pattern, new, every = (part.replace(f"\\{found[1]}", found[1]) for part in parts.groups())
    if "\\" in new or "&" in new or "[:" in pattern or re.search(r"\\[^.*\[\]^$/]", pattern):
        return None
    if not extended:
        pattern = re.sub(r"[+?(){}|]", lambda plain: f"\\{plain[0]}", pattern)
    try:
        lines = [re.sub(pattern, new, line, count=0 if every else 1) for line in text.splitlines()]
    except re.error:
        return None
    return _lines(lines), True


def _awk(rest: list[str], text: str) -> Said | None:
    """``{print $2}`` and ``{print $NF}``, with ``-F``."""
    given = _options(rest, "F")
    if given is None or len(given[1]) != 1:
        return None
    found = re.fullmatch(r"\s*\{\s*print\s+\$(\d+|NF)\s*;?\s*\}\s*", given[1][0])
    mark = given[0].get("F")
    if found is None or (mark is not None and len(mark) != 1):
        return None
    lines = []
    for line in text.splitlines():
        parts = line.split() if mark in (None, " ") else line.split(mark)
        place = len(parts) if found[1] == "NF" else int(found[1])
        lines.append(line if place == 0 else parts[place - 1] if 0 < place <= len(parts) else "")
    return _lines(lines), True


def _wc(rest: list[str], text: str) -> Said | None:
    counts = {"-l": text.count("\n"), "-w": len(text.split()), "-c": len(text.encode())}
    return (f"{counts[rest[0]]}\n", True) if len(rest) == 1 and rest[0] in counts else None


def _head(rest: list[str], text: str) -> Said | None:
    count = _count(rest)
    return None if count is None else (_lines(text.splitlines()[:count]), True)


def _tail(rest: list[str], text: str) -> Said | None:
    count = _count(rest)
    return None if count is None else (_lines(text.splitlines()[-count:] if count else []), True)


def _count(rest: list[str]) -> int | None:
    found = re.fullmatch(r"(?:-n ?|-)?(\d+)|", " ".join(rest))
    return None if found is None else int(found[1] or 10)


def _grep(rest: list[str], text: str) -> Said | None:
    """``-q`` and ``-i``, ``-E``, ``-F`` with it."""
    flags = "".join(word[1:] for word in rest if re.fullmatch(r"-[qiEF]+", word))
    plain = [word for word in rest if not word.startswith("-")]
    if "q" not in flags or len(plain) != 1 or len(plain) + sum(word[:1] == "-" for word in rest) != len(rest):
        return None
    pattern = re.escape(plain[0]) if "F" in flags else plain[0]
    if "F" not in flags and ("[:" in pattern or "\\" in pattern):
        return None
    if "E" not in flags and "F" not in flags:
        pattern = re.sub(r"[+?(){}|]", lambda mark: f"\\{mark[0]}", pattern)
    try:
        found = any(re.search(pattern, line, re.I if "i" in flags else 0) for line in text.splitlines())
    except re.error:
        return None
    return "", found


def _xargs(rest: list[str], text: str) -> Said | None:
    if rest or re.search(r"[\"'\\]", text):
        return None
    return " ".join(text.split()) + "\n", True


def _bc(rest: list[str], text: str) -> Said | None:
    if rest not in ([], ["-l"]):
        return None
    said = in_bc(text, library=bool(rest))
    return None if said is None else (said, True)


def _cat(rest: list[str], text: str) -> Said | None:
    return None if rest else (text, True)


def _python(rest: list[str], text: str) -> Said | None:
    if rest[:1] == ["-c"] and len(rest) >= 2:
        said = calculated(rest[1], rest[2:])
    else:  # a program behind <<EOF
        said = calculated(text, rest[1:]) if rest[:1] in ([], ["-"]) else None
    return None if said is None else (said, True)


_PROGRAMS: dict[str, Callable[[list[str], str], Said | None]] = {
    "cut": _cut,
    "tr": _tr,
    "sed": _sed,
    "awk": _awk,
    "wc": _wc,
    "head": _head,
    "tail": _tail,
    "grep": _grep,
    "cat": _cat,
    "xargs": _xargs,
    "bc": _bc,
    "python": _python,
    "python3": _python,
}


def _options(rest: Sequence[str], letters: str) -> tuple[dict[str, str], list[str]] | None:
    """The options that take a value, ``-d _`` or ``-d_``, and the other words; None where there is another option."""
    options: dict[str, str] = {}
    others: list[str] = []
    words = iter(rest)
    for word in words:
        if not re.match(r"-[A-Za-z]", word):
            others.append(word)
        elif word[1] not in letters:
            return None
        else:
            options[word[1]] = word[2:] or next(words, "")
    return options, others


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
