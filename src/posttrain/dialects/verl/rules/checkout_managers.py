"""Reward managers in a checkout of a fork: the file and the class that its own code chooses by a name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# verl's folders in a fork, and the same folder of a package that builds on verl
FOLDERS = (
    "verl/workers/reward_manager",
    "verl/experimental/reward_loop/reward_manager",
    "*/workers/reward_manager",
    "*/verl/workers/reward_manager",  # the checkout of verl is a folder of the repository
)
# Programs that choose a manager by comparing its name
_CHOOSE = ("verl/trainer/main_ppo.py", "verl/trainer/ppo/reward.py", "*/verl/trainer/main_ppo.py")


def manager_in_checkout(name: str) -> tuple[str, str] | None:
    """Find a manager below the current folder. Returns: its file, and the name that it has there: the one that it is registered
    under by ``@register``, else its class, which a mapping of names to classes or an ``if`` on the name chooses. None without
    one. Files are parsed, not run.
    """
    files = [file for folder in FOLDERS for file in sorted(Path().glob(f"{folder}/*.py"))]
    texts = {file: file.read_text("utf-8", errors="replace") for file in files}
    registers = re.compile(rf"""@register\(\s*["']{re.escape(name)}["']""")
    if (found := next((file for file, text in texts.items() if registers.search(text)), None)) is not None:
        return str(found), name
    programs = [file for pattern in _CHOOSE for file in sorted(Path().glob(pattern))]
    chooses = {file: file.read_text("utf-8", errors="replace") for file in programs}
    classes = [each for text in (*texts.values(), *chooses.values()) if name in text for each in _chosen(text, name)]
    for each in classes:
        defines = re.compile(rf"^class {re.escape(each)}\b", re.M)
        if (found := next((file for file, text in texts.items() if defines.search(text)), None)) is not None:
            return str(found), each
    return None


def _chosen(text: str, name: str) -> Iterator[str]:
    """The names of classes that a program chooses for a manager's name."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Name):
                    yield value.id
        elif isinstance(node, ast.If) and _compares_with(node.test, name):
            for each in node.body:
                if isinstance(each, ast.Assign) and isinstance(each.value, ast.Name):
                    yield each.value.id


def _compares_with(test: ast.expr, name: str) -> bool:
    """Return True for ``chosen == "name"``."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return False
    return any(isinstance(side, ast.Constant) and side.value == name for side in (test.left, *test.comparators))
