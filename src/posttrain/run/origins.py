"""The start of a run on record: the command, the machine, and the commit of the folder that the user was in."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.config.base import Section
from posttrain.config.shown import hidden_texts, is_secret
from posttrain.run.commit import commit_of

HIDDEN = "***"


def started_by(config: Section, now: str) -> dict[str, Any]:
    """The entry of run.json about a start. Secrets in the command are left out."""
    return {
        "time": now,
        "command": command_text(sys.argv, hidden_texts(config)),
        "host": socket.gethostname(),
        "folder": str(Path.cwd()),
        **commit_of(Path.cwd()),
    }


def command_text(arguments: Sequence[str], secrets: Sequence[str] = ()) -> str:
    """A command as it could be typed again, but for secrets: these texts, and what stands under a name such as api_key."""
    shown, follows = [], False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        secret = is_secret(re.split(r"[.\[\]]", name.strip("-+~]"))[-1])
        if follows or (secret and equals and not value.startswith("${oc.env:")):
            argument = f"{name}={HIDDEN}" if equals and not follows else HIDDEN
        for text in secrets:
            argument = argument.replace(text, HIDDEN)
        follows = secret and not equals and argument.startswith("--")
        shown.append(argument)
    if not shown:
        return ""
    program = Path(shown[0])
    # python -m posttrain
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *shown[1:]])
