"""Programs whose output is known without running them: basename, dirname, date, echo and the like."""

from __future__ import annotations

import getpass
import os
import re
import socket
import time

from posttrain.dialects.scripts.arithmetic import computed
from posttrain.dialects.scripts.state import Shell


def output_of(shell: Shell, words: list[str]) -> str | None:
    """The standard output of a program; None for a program that would have to run."""
    name, *rest = words
    plain = [word for word in rest if not word.startswith("-")]
    match name:
        case "echo":
            return " ".join(word for word in rest if word not in ("-n", "-e")) + ("" if "-n" in rest else "\n")
        case "printf":
            return _printf(rest)
        case "pwd":
            return f"{shell.folder}\n"
        case "basename" if plain:
            base = os.path.basename(plain[0].rstrip("/"))
            return f"{base.removesuffix(plain[1]) if len(plain) > 1 else base}\n"
        case "dirname" if plain:
            return f"{os.path.dirname(plain[0].rstrip('/')) or '.'}\n"
        case "realpath" | "readlink" if plain:
            return f"{(shell.folder / plain[0]).resolve()}\n"
        case "date" if not plain or plain[0].startswith("+"):
            return time.strftime(plain[0][1:] if plain else "%c") + "\n"
        case "expr":
            number = computed(shell, " ".join(rest))
            return None if number is None else f"{number}\n"
        case "whoami":
            return f"{getpass.getuser()}\n"
        case "hostname" if not rest:
            return f"{socket.gethostname()}\n"
        case "nproc" if not rest:
            return f"{os.cpu_count() or 1}\n"
        case "seq" if plain and all(re.fullmatch(r"\d+", word) for word in plain) and len(plain) <= 2:
            numbers = range(int(plain[0]) if len(plain) > 1 else 1, int(plain[-1]) + 1)
            return "".join(f"{number}\n" for number in numbers)
        case "true" | ":" | "false" | "export" | "set":
            return ""
    return None


def _printf(words: list[str]) -> str | None:
    if not words or words[0] == "-v":
        return None
    form, values = words[0].replace("\\n", "\n").replace("\\t", "\t"), words[1:]
    parts = re.split(r"(%(?:s|d|%))", form)
    if any("%" in part for part in parts[::2]):
        return None
    text = ""
    while True:
        for part in parts:
            text += "%" if part == "%%" else (values.pop(0) if values else "") if part in ("%s", "%d") else part
        if not values or not any(part in ("%s", "%d") for part in parts):
            return text
