"""A training engine's name stands in its folder, in its plan, and where a dialect has a word of its own; nowhere else."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from posttrain.registry import ENGINE_PLANS, TRAIN_ENGINES
from sources import FILES, PACKAGE, nodes_of

# One engine is the default of the configuration, a whole model on one device; its name is given once.
DEFAULT = "config/policy.py"


@cache
def texts(path: Path) -> list[str]:
    """The strings of a file, without its docstrings."""
    plain = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
    constants = [node for node in nodes_of(path) if isinstance(node, ast.Constant) and id(node) not in plain]
    return [node.value for node in constants if isinstance(node.value, str)]


def allowed(path: Path, engine: str) -> bool:
    inside = path.relative_to(PACKAGE).as_posix()
    places = (f"backends/train/{engine}/", f"plan/engines/{engine}.py", f"plan/engines/{engine}/")
    # Words of peers: their tables and strategies; names that other libraries give to formats and modes; commands of a shell.
    peers = inside.startswith("dialects/") and (
        "/keys/" in inside or inside.endswith(("strategies.py", "ledger.py", "option_names.py"))
    )
    others = inside.startswith(("backends/rollout/", "backends/tracking/", "dialects/scripts/"))
    others = others or inside.endswith("runtime/ray/cluster.py")
    # Packages that a fork's class may import, and strategies of verl's actors.
    others = others or inside in ("verl_episodes.py", "verl_updates.py")
    return inside.startswith(places) or peers or others or (engine == "local" and inside == DEFAULT)


@pytest.mark.parametrize("engine", TRAIN_ENGINES.names())
def test_an_engine_is_named_at_home_only(engine: str) -> None:
    named = re.compile(rf"{engine}|.*engine={engine}\b.*", re.DOTALL)
    found = [
        f"{path}: {text}"
        for path in FILES
        if not allowed(path, engine)
        for text in texts(path)
        if named.fullmatch(text)
    ]
    assert found == []


def test_every_engine_has_a_plan() -> None:
    assert ENGINE_PLANS.names() == TRAIN_ENGINES.names()
