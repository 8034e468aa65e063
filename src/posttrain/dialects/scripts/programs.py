"""Programs whose output is known without running them: basename, dirname, date, echo and the like."""

from __future__ import annotations

import getpass
import os
import re
import socket
import time

from posttrain.dialects.scripts.arithmetic import computed
from posttrain.dialects.scripts.calculations import calculated, in_awk
from posttrain.dialects.scripts.limits import MAX_WORDS
from posttrain.dialects.scripts.state import HOLE, Shell


def output_of(shell: Shell, words: list[str]) -> str | None:
    """The standard output of a program; None for a program that would have to run."""
    name, *rest = words
    name = "python3" if re.fullmatch(r".*/bin/python3?(\.\d+)?", name) else name
    plain = [word for word in rest if not word.startswith("-")]
    match name:
        case "echo":
            return _echo(rest)
        case "printf":
            return formatted(rest)
        case "pwd":
            return f"{shell.folder}\n"
        case "basename" if plain and plain == rest and len(rest) <= 2:
            base = os.path.basename(plain[0].rstrip("/"))
            return f"{base.removesuffix(plain[1]) if len(plain) > 1 else base}\n"
        case "dirname" if len(rest) == 1 and plain:
            return f"{os.path.dirname(plain[0].rstrip('/')) or '.'}\n"
        case "realpath" | "readlink" if len(plain) == 1 and (
            rest[0] in ("-f", "-e", "-m") or (name == "realpath" and rest == plain)
        ):
            place = shell.folder / plain[0]
            return f"{os.path.normpath(place) if HOLE.search(str(place)) else place.resolve()}\n"
        case "date" if rest and len(rest) == 1 and re.fullmatch(r"\+(%[YmdHMSsyjBbAaFTp%]|[^%])*", rest[0]):
            return time.strftime(rest[0][1:]) + "\n"
        case "expr":
            number = computed(shell, " ".join(rest))
            return None if number is None else f"{number}\n"
        case "whoami":
            return f"{getpass.getuser()}\n"
        case "hostname" if not rest:
            return f"{socket.gethostname()}\n"
        case "nproc" if not rest:
            return f"{os.cpu_count() or 1}\n"
        case "seq" if plain and all(re.fullmatch(r"\d+", word) for word in plain) and plain == rest and len(plain) <= 2:
            if int(plain[-1]) > MAX_WORDS:
                return None
            numbers = range(int(plain[0]) if len(plain) > 1 else 1, int(plain[-1]) + 1)
            return "".join(f"{number}\n" for number in numbers)
        case "python" | "python3" if rest[:1] == ["-c"] and len(rest) >= 2:
            return calculated(rest[1], rest[2:])
        case "awk" | "gawk" if len(rest) == 1:
            return in_awk(rest[0])
        case "mkdir" | "true" | ":" | "false" | "export" | "set":
            return ""
    return None


def _echo(words: list[str]) -> str | None:
    """``echo`` with its options, which stand first; None for a text whose backslashes mean something."""
    options = ""
    while words and re.fullmatch(r"-[neE]+", words[0]):
        options += words[0]
        words = words[1:]
    text = " ".join(words)
    if "e" in options and "\\" in text:
        return None
    return text + ("" if "n" in options else "\n")


def formatted(words: list[str]) -> str | None:
    """The text that ``printf`` writes; None for a format with other than %s, %d and %%."""
    if words[:1] == ["--"]:
        words = words[1:]
    if not words or words[0].startswith("-"):
        return None
    form, values = words[0].replace("\\n", "\n").replace("\\t", "\t"), words[1:]
    parts = re.split(r"(%(?:s|d|%))", form)
    takes = [part for part in parts if part in ("%s", "%d")]
    if any("%" in part for part in parts[::2]) or "\\" in form:
        return None
    if "%d" in takes and not all(re.fullmatch(r"-?[1-9]\d*|0", value) for value in values):
        return None
    text = ""
    while True:
        for part in parts:
            if part in ("%s", "%d"):
                text += values.pop(0) if values else "0" if part == "%d" else ""
            else:
                text += "%" if part == "%%" else part
        if not values or not takes:
            return text
