"""Names in the package skyrl-gym, known without importing it."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

# Registered by the package's version 0.4.
SHIPPED = ("aime", "gsm8k", "gsm8k_multi_turn", "lcb", "search", "searchcode", "text2sql")
# Execute model-written code in processes without a sandbox. (The queries of text2sql run in sandboxes: envs/skyrl_sql.py.)
RUN_CODE = ("lcb", "searchcode")
# Their episodes depend on the row and the actions alone, so one is saved as its actions.
REPLAYED = ("aime", "gsm8k", "gsm8k_multi_turn", "text2sql")
ROWS = "ProgramRows"  # the class of rows that a program on SkyRL reads itself (envs/skyrl_program/rows.py)
FULL_LENGTH = "FullLengthPrompts"  # the class of prompts of SkyRL's program full_context (data/full_length.py)

# The package of a fork, from the folders of its checkout.
_CHECKOUTS = ("skyrl-gym/skyrl_gym", "../skyrl-gym/skyrl_gym", "skyrl_gym")


def registered() -> list[str]:
    """Return the ids that the installed package registers, read from its source; those of version 0.4 without it."""
    spec = find_spec("skyrl_gym")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if found := _registrations(Path(folder)):
            return sorted(found)
    return list(SHIPPED)


def of_checkout() -> dict[str, str]:
    """Return the ids that a fork's skyrl-gym, in or beside the current folder, registers and the package does not, with the class
    of each: path/to/file.py:Class."""
    for place in _CHECKOUTS:
        found = _registrations(Path(place))
        new = {name: _file_of(Path(place), where) for name, where in found.items() if name not in SHIPPED}
        if classes := {name: where for name, where in new.items() if where is not None}:
            return classes
    return {}


def _registrations(package: Path) -> dict[str, str]:
    """The calls of register in a package skyrl_gym: id -> module:Class."""
    file = package / "envs" / "__init__.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    found = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            given = {each.arg: each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)}
            if isinstance(given.get("id"), str):
                found[str(given["id"])] = str(given.get("entry_point", ""))
    return found


def _file_of(package: Path, where: str) -> str | None:
    """The file of a class of the package; None where it is not there."""
    module, _, name = where.partition(":")
    file = package.parent.joinpath(*module.split(".")).with_suffix(".py")
    return f"{file}:{name}" if name and file.is_file() else None
