"""Runs in the place of Ray's ``setup_worker.py``: the worker is forked from the server of warm processes, and this process waits
for its end. Without a server Ray's own file runs, with the same arguments."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from warm.client import CHILDREN, SOCKET, ask, end_of

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main(arguments: list[str]) -> int:
    rest = [each for each in arguments if not each.startswith((CONTEXT, LANGUAGE))]
    context = json.loads(next((each[len(CONTEXT) :] for each in arguments if each.startswith(CONTEXT)), "{}"))
    own_command = context.get("command_prefix") or context.get("override_worker_entrypoint")
    if f"{LANGUAGE}PYTHON" not in arguments or own_command or not rest[0].endswith("default_worker.py"):
        return cold()
    path = os.environ.get(SOCKET, "")
    try:
        connection, pid = ask(path, rest, {**os.environ, **context.get("env_vars", {})})
    except (OSError, RuntimeError):
        return cold()
    note = Path(path).parent / CHILDREN / str(os.getpid())
    note.write_text(str(pid))
    code = end_of(connection)
    note.unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def cold() -> int:
    """Become what Ray would have started."""
    import ray

    own = str(Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py")
    os.execv(sys.executable, [sys.executable, own, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
