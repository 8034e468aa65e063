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


def registered() -> list[str]:
    """Return the ids that the installed package registers, read from its source; those of version 0.4 without it."""
    spec = find_spec("skyrl_gym")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        file = Path(folder) / "envs" / "__init__.py"
        if file.is_file():
            calls = [
                node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
            ]
            given = [each.value for call in calls for each in call.keywords if each.arg == "id"]
            return sorted(str(each.value) for each in given if isinstance(each, ast.Constant)) or list(SHIPPED)
    return list(SHIPPED)
