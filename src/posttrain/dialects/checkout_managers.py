"""Reward managers in a checkout of a fork: the file and the class that its own code chooses by a name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain.dialects.trees import NOTHING

# verl's own
MANAGERS = ("naive", "prime", "dapo", "batch", "remote", "gdpo", "rate_limited")
# Arguments that every manager gets from the run
_FROM_THE_RUN = frozenset(
    """tokenizer num_examine compute_score reward_fn_key config reward_router_address reward_model_tokenizer""".split()  # noqa: SIM905
)

CONFIG = "config"
_LOADER = "load_reward_manager"  # verl's function that constructs the manager which the configuration names

# verl's folders in a fork, and the same folder of a package that builds on verl
FOLDERS = (
    "verl/workers/reward_manager",
    "verl/experimental/reward_loop/reward_manager",
    "*/workers/reward_manager",
    "*/verl/workers/reward_manager",  # the checkout of verl is a folder of the repository
)
_BASE = "reward_manager"  # a part of the module that a file imports the function which registers from
MOST_FOLDERS, MOST_FILES = 100, 3000  # of a checkout
# Programs that choose a manager by comparing its name
_CHOOSE = ("verl/trainer/main_ppo.py", "verl/trainer/ppo/reward.py", "*/verl/trainer/main_ppo.py")


def manager_in_checkout(name: str) -> tuple[str, str] | None:
    """Find a manager below the current folder. Returns: its file, and the name that it has there: the one that it is registered
    under by ``@register``, else its class, which a mapping of names to classes or an ``if`` on the name chooses. None without
    one. Files are parsed, not run.
    """
    files = [file for folder in FOLDERS for file in sorted(Path().glob(f"{folder}/**/*.py"))]
    texts = {file: file.read_text("utf-8", errors="replace") for file in files}
    # A recipe imports verl's function as register_manager
    registers = re.compile(rf"""@\w*register\w*\(\s*["']{re.escape(name)}["']""")
    if (found := next((file for file, text in texts.items() if registers.search(text)), None)) is not None:
        return str(found), name
    programs = [file for pattern in _CHOOSE for file in sorted(Path().glob(pattern))]
    chooses = {file: file.read_text("utf-8", errors="replace") for file in programs}
    classes = [each for text in (*texts.values(), *chooses.values()) if name in text for each in _chosen(text, name)]
    for each in classes:
        defines = re.compile(rf"^class {re.escape(each)}\b", re.M)
        if (found := next((file for file, text in texts.items() if defines.search(text)), None)) is not None:
            return str(found), each
    for file in _elsewhere():
        text = file.read_text("utf-8", errors="replace")
        if _BASE in text and registers.search(text):
            return str(file), name
    return None


def _elsewhere() -> Iterator[Path]:
    """The files of recipes and of other folders of a checkout beside verl's, up to MOST_FILES."""
    folders = [each for each in sorted(Path().iterdir()) if each.is_dir() and each.name[0] not in "._"]
    beside = [each for each in folders if each.name != "verl"] if len(folders) < MOST_FOLDERS else []
    files = (file for folder in beside if Path("verl").is_dir() for file in folder.rglob("*.py"))
    yield from sorted(islice(files, MOST_FILES))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """An argument that a fork's program hands to a manager beside those of every manager."""

    name: str
    text: str  # the expression, as written
    where: str  # FILE:LINE
    key: str = ""  # of the configuration, where the expression reads one: config.reward_model.get("scale", 1)
    value: Any = NOTHING  # a constant, or what holds without the key
    needed: bool = False  # the class has no default for it


def handed_to(manager: str, file: str) -> list[Handed]:
    """Find the arguments that a fork's program hands to a manager of this class name, which ``file`` defines; those that its
    constructor does not take are left out. Files are parsed, not run."""
    taken = _constructor(manager, Path(file))
    for program in (each for pattern in _CHOOSE for each in sorted(Path().glob(pattern))) if taken else ():
        call = _construction(program, manager)
        if call is not None:
            return [
                _handed(one.arg, one.value, f"{program}:{call.lineno}", needed=taken[one.arg])
                for one in call.keywords
                if one.arg in taken and (one.arg not in _FROM_THE_RUN or (one.arg == CONFIG and _is_section(one.value)))
            ]
    return []


def _is_section(value: ast.expr) -> bool:
    """Return True for a part of the configuration; the whole of it is handed over in any case."""
    return _key_of(value) != ""


def arguments_of(manager: str, file: str) -> list[str]:
    """Return the parameters of a class's constructor."""
    return [name for name in _constructor(manager, Path(file)) if name is not None]


def _constructor(manager: str, file: Path) -> dict[str | None, bool]:
    """The parameters of a class's constructor: True for one without a default."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ClassDef) and node.name == manager:
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    given = each.args
                    names = [one.arg for one in given.args]
                    first = len(names) - len(given.defaults)
                    found: dict[str | None, bool] = {name: place < first for place, name in enumerate(names)}
                    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
                    return found | {one.arg: default is None for one, default in pairs}
    return {}


def _construction(program: Path, manager: str) -> ast.Call | None:
    """The call of a program that constructs the training manager: the first behind the place where its class is chosen."""
    tree = _tree(program)
    chosen = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == manager
    ]
    names = {target.id for node in chosen for target in node.targets if isinstance(target, ast.Name)} | {
        manager,
        _LOADER,
    }
    after = min((node.lineno for node in chosen), default=0)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        if node.lineno > after and any(one.arg == "num_examine" for one in node.keywords)
    ]
    return min(calls, key=lambda node: node.lineno, default=None)


def _handed(name: str | None, value: ast.expr, where: str, *, needed: bool) -> Handed:
    key, otherwise = "", NOTHING
    match value:
        case ast.Constant(value=constant):
            otherwise = constant
        case ast.Call(func=ast.Attribute(attr="get", value=section), args=[ast.Constant(value=str(last)), *rest]):
            key = f"{_key_of(section)}.{last}" if _key_of(section) else ""
            if not key:
                otherwise = NOTHING
            elif rest and isinstance(rest[0], ast.Constant):
                otherwise = rest[0].value
            elif not rest:
                otherwise = None
        case ast.Attribute():
            key = _key_of(value)
    return Handed(name=str(name), text=ast.unparse(value), where=where, key=key, value=otherwise, needed=needed)


def _key_of(node: ast.expr) -> str:
    """``config.reward_model.scale`` as a key; "" for another expression."""
    text = ast.unparse(node)
    found = re.fullmatch(r"(?:self\.)?config\.(\w+(?:\.\w+)*)", text)
    return found[1] if found else ""


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text("utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])
