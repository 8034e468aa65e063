"""Trainers that a program puts in the place of the peer's, and what they play episodes by: parsed, never run.

One of SkyRL's that makes its calls is taken as SkyRL's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.checkout_files import file_of, parsed
from posttrain.dialects.scripts.asks import listed
from posttrain.dialects.scripts.own_loops import own_calls
from posttrain.dialects.scripts.own_sources import imports_of
from posttrain.dialects.scripts.peer_trainers import SKYRL_LOOP_CALLS, SKYRL_REPLACED, SKYRL_STEP
from posttrain.dialects.scripts.trainers import Trainer

_RUNS = "++posttrain.environment.name=skyrl_agent"
_LOOP = re.compile(r"""\+*algorithm\.adv_estimator=["']?loop["']?""")
_MODULE = re.compile(r"skyrl(_train|\.train)\.trainer")


def difference(name: str, file: Path, roots: Sequence[Path]) -> str:
    """Say in which way a trainer, as the file names it, differs from SkyRL's RayPPOTrainer; "" for one whose loop makes the calls
    of a step and no others than SkyRL's."""
    found = _class_of(name, file, roots)
    if found is None:
        return f"{name} is not here"
    definition, place = found
    title = f"{name} (line {definition.lineno} of {place})"
    base = ast.unparse(definition.bases[0]).rpartition(".")[2] if len(definition.bases) == 1 else ""
    source = parsed(place)
    given = imports_of(source).get(base) if source is not None else None
    if given is None or given.name != "RayPPOTrainer" or not _MODULE.fullmatch(given.module):
        return f"{title} does not derive from SkyRL's RayPPOTrainer alone"
    methods = {each.name: each for each in definition.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    for method in methods.values():
        if method.name not in SKYRL_REPLACED:
            return f"{name}.{method.name} (line {method.lineno} of {place}) is not SkyRL's"
        # Methods of SkyRL's that the loop calls are those of the base; the class has no others of its own
        if calls := own_calls(method, set(), SKYRL_LOOP_CALLS):
            return (
                f"{name}.{method.name} (line {method.lineno} of {place}) calls {listed(calls)}, which SkyRL's does not"
            )
    if "train" in methods and (missing := [each for each in SKYRL_STEP if each not in _called(methods["train"])]):
        return (
            f"{name}.train (line {methods['train'].lineno} of {place}) does not call {missing[0]}, which SkyRL's does"
        )
    return ""


def own_manager(definition: ast.ClassDef, file: Path, roots: Sequence[Path]) -> str:
    """Name the class of a checkout that a trainer on verl's makes its ``async_rollout_manager``, and that plays episodes by a
    ``generate_sequences`` of its own; "" where there is none."""
    found = _manager_of(definition, file, roots)
    return (
        f"{found[0].name} (line {found[0].lineno} of {found[1]}) plays its episodes, in a way of its own"
        if found
        else ""
    )


def runner_of(definition: ast.ClassDef, file: Path, roots: Sequence[Path]) -> list[str]:
    """The overrides that let skyrl-agent's runner play, where such a manager makes one of a task's file that its configuration
    names: ``AutoAgentRunner.from_task(task_yaml=config.skyrl_agent.task_yaml, ...)``. Empty for another manager."""
    found = _manager_of(definition, file, roots)
    for node in ast.walk(found[0]) if found else ():
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "AutoAgentRunner.from_task" and found):
            continue
        named = [ast.unparse(each.value) for each in node.keywords if each.arg == "task_yaml"]
        key = named[0].removeprefix("self.").removeprefix("config.") if named and "config." in named[0] else ""
        folder = next((each for each in found[1].parents if not (each / "__init__.py").is_file()), None)
        if not key or folder is None:
            continue
        return [
            _RUNS,
            f"++posttrain.environment.settings.folder='{folder}'",
            f"++posttrain.environment.settings.task=${{{key}}}",
            # The trainer repeats each prompt so often
            f"actor_rollout_ref.rollout.n=${{{key.rpartition('.')[0]}.num_trajectories}}",
        ]
    return []


def with_loop_estimator(trainer: Trainer, words: Sequence[str]) -> Trainer:
    """Read the estimator ``loop`` of a command with such a runner, which the fork of verl has that skyrl-agent is installed with,
    as the leave-one-out baseline whose name it is (LOOP, arXiv:2502.01600)."""
    if _RUNS not in trainer.adds or not any(_LOOP.fullmatch(word) for word in words):
        return trainer
    note = (
        "algorithm.adv_estimator=loop is of NovaSky-AI's fork of verl, which is not here, and is read as rloo: "
        "leave-one-out rewards (LOOP, arXiv:2502.01600)"
    )
    return replace(trainer, notes=(*trainer.notes, note), adds=(*trainer.adds, "algorithm.adv_estimator=rloo"))


def _manager_of(definition: ast.ClassDef, file: Path, roots: Sequence[Path]) -> tuple[ast.ClassDef, Path] | None:
    """The class that a trainer makes its ``async_rollout_manager``, with a ``generate_sequences`` of its own, and its file."""
    source = parsed(file)
    imported = imports_of(source) if source is not None else {}
    for node in ast.walk(definition):
        made = node.value if isinstance(node, ast.Assign) else None
        if not (isinstance(node, ast.Assign) and isinstance(made, ast.Call) and isinstance(made.func, ast.Name)):
            continue
        if not any(isinstance(each, ast.Attribute) and each.attr == "async_rollout_manager" for each in node.targets):
            continue
        given = imported.get(made.func.id)
        if given is not None and given.module.startswith("verl."):
            continue
        found = _class_of(made.func.id, file, roots)
        if found is not None and "generate_sequences" in _methods(found[0]):
            return found
    return None


def _methods(definition: ast.ClassDef) -> set[str]:
    return {each.name for each in definition.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def _class_of(name: str, file: Path, roots: Sequence[Path]) -> tuple[ast.ClassDef, Path] | None:
    """The definition of a class in a file, or in the one that it imports the class from."""
    source = parsed(file)
    if source is None:
        return None
    given = imports_of(source).get(name)
    if given is not None:
        place = file_of(given.module, file, roots)
        source, name = (parsed(place) if place is not None else None), given.name
        file = place or file
    found = (each for each in source.body if isinstance(each, ast.ClassDef) and each.name == name) if source else ()
    definition = next(iter(found), None)
    return None if definition is None else (definition, file)


def _called(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(method) if isinstance(node, ast.Call)}
