"""The Python that has ROLL, and the program that it runs."""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.errors import ConfigError, Problem

PYTHON = "POSTTRAIN_ROLL_PYTHON"
BRIDGE = Path(__file__).with_name("bridge.py")


def python_of(named: str | None) -> str:
    """Return the Python that has ROLL. Raises: ConfigError where none is named."""
    python = named or os.environ.get(PYTHON)
    if not python:
        what = "a manager of ROLL's needs a Python that has ROLL, and none is named"
        raise ConfigError(Problem(what, fix=f"set python: FOLDER/bin/python, or {PYTHON}", field="python"))
    return python
