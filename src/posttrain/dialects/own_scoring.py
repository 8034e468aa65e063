"""The scoring code of a fork, in the current folder or behind its script, where verl has none like it: it is called as it is.

Three places hold it: the class in the main program (verl up to 0.2, and forks of it), the reward managers, and the functions by
data source. A definition that no version of verl has is the fork's own (``verl_scoring``).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.checkout_files import parsed
from posttrain.dialects.checkout_managers import FOLDERS
from posttrain.dialects.env_managers import plays_managers
from posttrain.dialects.own_episodes import loop_of, values_of
from posttrain.dialects.reader import Reader
from posttrain.dialects.scripts.own_rewards import ProgramRewards, program_rewards
from posttrain.dialects.trees import value_at
from posttrain.dialects.words import OUR_SECTION, OWN_REWARDS
from posttrain.verl_rows import columns_read
from posttrain.verl_scoring import MAIN, SCORES, own_definitions, own_scores

_DEFAULTS = ("default_compute_score", "_default_compute_score")
_PLAIN = "naive"  # verl's manager that calls the function by data source for every response


def program_of(keys: Reader) -> ProgramRewards | None:
    """The reward object of the fork's main program, unless the user confirms that it is not meant; None without one."""
    if keys.ledger.dialect != "verl" or plays_managers(keys) or loop_of(keys) is not None:
        return None
    named = value_at(keys.values, OWN_REWARDS)
    found = _program(named if isinstance(named, str) else str(Path(MAIN).absolute()))
    return None if found is None or found.reward.name in keys.own_keys else found


@lru_cache(maxsize=8)
def _program(path: str) -> ProgramRewards | None:
    return program_rewards(Path(path)) if Path(path).is_file() else None


def program_term(keys: Reader) -> dict[str, Any]:
    """The reward term of such an object, with the configuration that its statements read; empty without one."""
    found = program_of(keys)
    if found is None:
        return {}
    site = found.reward.site
    if "" in site.keys:
        config = {name: value for name, value in keys.values.items() if name != OUR_SECTION}
    else:
        config = values_of(keys, [(found.reward.name, site)])
    keys.warn(f"rewards are those of {found.title}, which its statements make, in a process of its own")
    if found.validates:
        keys.warn(f"validation is scored as training is; the fork's is made by {found.validates}")
    return {"name": found.reward.name, "path": str(found.program), "kind": "program", "options": config}


def read_by_rewards(keys: Reader) -> set[str]:
    """The keys of the user's own that the statements of such an object read."""
    found = program_of(keys)
    if found is None:
        return set()
    read = found.reward.site.keys
    text = found.program.read_text("utf-8", errors="replace") if "" in read else ""
    return {
        each.key
        for each in keys.own
        if any(f"{each.key}.".startswith(f"{one}.") for one in read if one) or f".{each.key.rpartition('.')[2]}" in text
    }


def columns_of(term: dict[str, Any]) -> list[str]:
    """The further columns of the data that the class of such a term reads."""
    found = _program(term["path"])
    tree = parsed(found.reward.file) if found is not None else None
    return columns_read(tree) if tree is not None else []


def changed_manager(name: str) -> tuple[str, str] | None:
    """The file and the class of a manager that has the name of one of verl's and is the fork's own; None where it is verl's."""
    for file, owner in _managers(name):
        if own_definitions(file):
            return str(file), owner
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnClass:
    """A class of the fork's own that scores."""

    owner: str
    title: str


def adds_to_model(keys: Reader, manager: str) -> OwnClass | None:
    """The fork's own class that scores a step, unless it begins as verl's do, by returning the scores of a reward model:
    ``if "rm_scores" in data.batch.keys(): return data.batch["rm_scores"]``. None where it is verl's or does so."""
    program = program_of(keys)
    if program is not None:
        file, owner = program.reward.file, program.reward.name
    elif (changed := changed_manager(manager)) is not None:
        file, owner = Path(changed[0]), changed[1]
    else:
        return None
    source = parsed(file)
    for node in ast.walk(source) if source is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == owner and any(map(_returns_scores, ast.walk(node))):
            return None
    return OwnClass(owner=owner, title=f"{owner} of {file}")


def _returns_scores(node: ast.AST) -> bool:
    returns = isinstance(node, ast.If) and any(
        isinstance(each, ast.Return) for one in node.body for each in ast.walk(one)
    )
    return returns and isinstance(node, ast.If) and "rm_scores" in ast.unparse(node.test)


def manager_for_scores() -> tuple[str, str, list[str]] | None:
    """The manager that calls the checkout's function by data source, where that one or a scorer behind it is the fork's own:
    file, class, and the definitions that verl does not have. None where all are verl's."""
    if not (own := list(_own_scores(str(Path.cwd())))):
        return None
    return next(((str(file), owner, own) for file, owner in _managers(_PLAIN)), None)


@lru_cache(maxsize=8)
def _own_scores(root: str) -> tuple[str, ...]:
    start = Path(root) / SCORES / "__init__.py"
    source = parsed(start)
    defined = {node.name for node in source.body if isinstance(node, ast.FunctionDef)} if source is not None else set()
    return tuple(own_scores(start, Path(root))) if defined & {*_DEFAULTS} else ()


def _managers(name: str) -> list[tuple[Path, str]]:
    """The classes of the checkout that are registered under a name, or bear it as verl's do: the newer place first."""
    found = []
    for folder in reversed(FOLDERS):
        for file in sorted(Path().glob(f"{folder}/**/*.py")):
            source = parsed(file)
            for node in source.body if source is not None else []:
                if isinstance(node, ast.ClassDef) and name in (*_registered(node), _short(node.name)):
                    found.append((file, node.name))
    return found


def _registered(node: ast.ClassDef) -> list[str]:
    return [
        str(each.args[0].value)
        for each in node.decorator_list
        if isinstance(each, ast.Call) and each.args and isinstance(each.args[0], ast.Constant)
    ]


def _short(name: str) -> str:
    """``NaiveRewardManager`` -> ``naive``: verl's names before there was a registry."""
    return name.removesuffix("RewardManager").lower() if name.endswith("RewardManager") else ""
