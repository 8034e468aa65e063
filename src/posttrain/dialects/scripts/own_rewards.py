"""A fork's rewards that are written into its main program, ``verl/trainer/main_ppo.py``, as verl's own were up to 0.2. Files are
parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from posttrain.checkout_files import parsed
from posttrain.errors import Problem

_FUNCTION = "custom_reward_function.path"
# Of verl's own class, 0.1 and 0.2: functions that it calls, and what it is given
_CALLS = frozenset(("_select_rm_score_fn", "_default_compute_score", "default_compute_score"))
_GIVEN = frozenset(("self", "tokenizer", "num_examine", "compute_score", "reward_fn_key", "config"))


def own_rewards(program: Path, words: Sequence[str]) -> Problem | None:
    """The problem that a run needs confirmed where the program scores by a class of its own, which is not called here: one that
    calls further functions of the program, or is given further values. None where it is verl's, or where the command names a
    function."""
    source = parsed(program)
    given = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{_FUNCTION}=")]
    if source is None or (given and given[-1].strip("'\"") not in ("", "null", "None")):
        return None
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in source.body if isinstance(node, ast.FunctionDef)} - _CALLS
    made = [
        node.value.func.id
        for node in ast.walk(source)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        if [ast.unparse(each) for each in node.targets] == ["reward_fn"]
    ]
    definition = next((classes[name] for name in made if name in classes), None)
    if definition is None:
        return None
    read = dict.fromkeys(
        node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and node.id in functions
    )
    takes = [name for name in _parameters(definition) if name not in _GIVEN]
    if not read and not takes:
        return None
    parts = [f"calls {', '.join(read)}" if read else "", f"is given {', '.join(takes)}" if takes else ""]
    where = f"{definition.name} (line {definition.lineno} of {program})"
    what = f"the checkout scores by its own {where}, which {' and '.join(filter(None, parts))}; a run does not call it"
    fix = (
        f"name a function that scores so with {_FUNCTION}, or confirm that the scorers of the rows' data_source are meant: "
        f"+posttrain.own_keys=[{definition.name}]"
    )
    return Problem(what, fix=fix, field=definition.name)


def _parameters(definition: ast.ClassDef) -> list[str]:
    for each in definition.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return [one.arg for one in (*each.args.args, *each.args.kwonlyargs)]
    return []
