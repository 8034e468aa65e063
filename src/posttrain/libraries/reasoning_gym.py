"""The sole importer of reasoning-gym: task names, generators, verifiers, and the serialization of entries.

``data`` writes datasets of its tasks and ``rewards`` calls its verifiers; neither may import the other, so the adapter is
below both. The library takes about a second to import, on the first call that needs it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from posttrain.errors import ConfigError, MissingDependency, Problem, did_you_mean
from posttrain.registry import missing_library

# Tasks whose verifier calls Python's eval, directly or through sympy's parser, usually on the answer. Model text is never
# evaluated in the trainer's process, so these need sandboxed reward workers. Seen in reasoning-gym 0.1.25; a test compares
# the list with the installed verifiers.
EVALUATING_TASKS = frozenset(
    {
        "binary_matrix",
        "bitwise_arithmetic",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "number_sorting",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
# A mixture of other tasks, not a task: its verifier needs the generators of the whole mixture.
_MIXTURES = {"composite"}
# Items per generator object. Item i is drawn from seed + i, so successive generators continue one stream.
_CHUNK = 1000


def check_installed(needed_by: str) -> None:
    """Raises: MissingDependency, with the install command, when reasoning-gym is absent. Does not import it."""
    if find_spec("reasoning_gym") is None:
        raise MissingDependency(missing_library("reasoning_gym", needed_by))


def check_scorable(task: str) -> None:
    """Raises: ConfigError for a task whose verifier must not run in this process."""
    if task in EVALUATING_TASKS:
        raise ConfigError(
            Problem(
                f"reasoning-gym's verifier of {task} passes text to Python's eval, and text from a model is never "
                "evaluated in the training process",
                fix="choose another task, or score it with a function of your own (reward.terms with path)",
            )
        )


def task_names() -> list[str]:
    """Return the names of all single tasks, sorted."""
    return sorted(set(_library().factory.DATASETS) - _MIXTURES)


def option_names(task: str) -> list[str]:
    """Return the options of a task's generator, except seed and size, which the caller sets."""
    _, config = _library().factory.DATASETS[task]
    return [item.name for item in fields(config) if item.name not in ("seed", "size")]


def generator(task: str, *, seed: int, size: int, options: Mapping[str, Any]) -> Any:
    """Create a reasoning_gym ProceduralDataset of ``size`` items; it also verifies answers (``score_answer(answer, entry)``).

    Raises: ConfigError for an unknown task or option, or an invalid value.
    """
    names = task_names()
    if task not in names:
        raise ConfigError(Problem(f"reasoning-gym has no task called {task!r}", fix=_suggest(task, names)))
    known = option_names(task)
    unknown = [
        Problem(
            f"{task} has no option called {name!r} (known: {', '.join(known)})",
            fix="seed and the number of rows have settings of their own"
            if name in ("seed", "size")
            else did_you_mean(name, known),
        )
        for name in options
        if name not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    try:
        return _library().create_dataset(task, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(Problem(f"{task} cannot be made with options {dict(options)}: {error}")) from error


def entries(task: str, *, seed: int, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield endless entries (question, answer, metadata) of a task; questions may repeat.

    reasoning-gym draws item i from ``seed + i``, so seeds 1 and 2 would give nearly the same items. The seed is therefore
    spread over a wide range first, so that streams of different seeds overlap only by chance.
    """
    first = random.Random(seed).getrandbits(30)
    while True:
        chunk = generator(task, seed=first, size=_CHUNK, options=options)
        for index in range(_CHUNK):
            with contextlib.redirect_stdout(io.StringIO()):  # some generators print their search
                entry = chunk[index]
            yield entry
        first += _CHUNK


def category(task: str) -> str:
    """Return the category of a task, such as arithmetic."""
    dataset, _ = _library().factory.DATASETS[task]
    return str(dataset.__module__.split(".")[1])


@functools.cache
def _verifier(task: str, options: str) -> Any:
    return generator(task, seed=0, size=1, options=json.loads(options))


def verify(task: str, options: str, answer: str, entry: Mapping[str, Any]) -> float:
    """Score an answer with the task's verifier, usually 0 to 1. ``options`` is the JSON text the entry was written with.

    Raises: ConfigError as ``generator`` and ``check_scorable`` do; any error of the task's verifier.
    """
    check_scorable(task)
    return float(_verifier(task, options).score_answer(answer, dict(entry)))


def preload() -> None:
    """Import reasoning-gym, which takes seconds. Raises: MissingDependency."""
    _library()


def entry_to_text(entry: Mapping[str, Any]) -> str:
    """Serialize an entry as JSON text, from which ``entry_from_text`` restores an equal one.

    Some verifiers compare tuples or look up integer keys in the metadata, and JSON has neither: a tuple is written as
    {"__tuple__": [...]}, a mapping whose keys are not all text as {"__items__": [[key, value], ...]}.
    """
    return json.dumps(_to_json(entry), ensure_ascii=False)


def entry_from_text(text: str) -> dict[str, Any]:
    """Restore an entry. Raises: ValueError when the text is not in the form of ``entry_to_text``."""
    entry = _from_json(json.loads(text))
    if not isinstance(entry, dict) or "question" not in entry or "answer" not in entry:
        raise ValueError("not a reasoning-gym entry: a question and an answer are expected")
    return entry


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_to_json(item) for item in value]}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _to_json(item) for key, item in value.items()}
        return {"__items__": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {"__tuple__"}:
            return tuple(_from_json(item) for item in value["__tuple__"])
        if set(value) == {"__items__"}:
            return {_from_json(key): _from_json(item) for key, item in value["__items__"]}
        return {key: _from_json(item) for key, item in value.items()}
    return value


@functools.cache
def _library() -> Any:
    check_installed("reasoning-gym tasks")
    _stand_in_for_pycosat()
    return importlib.import_module("reasoning_gym")


def _stand_in_for_pycosat() -> None:
    """Allow the import of reasoning-gym where pycosat cannot be installed.

    reasoning-gym 0.1.25 imports pycosat (a C extension published without wheels) at its own import, but only zebra_puzzles uses
    it. Without a C compiler, a replacement module is registered that fails when called.
    Unnecessary once reasoning-gym imports pycosat on use, or pycosat is published with wheels.
    """
    if find_spec("pycosat") is not None:
        return

    def absent(*_arguments: Any, **_options: Any) -> None:
        raise MissingDependency(
            missing_library("pycosat", "the reasoning-gym task zebra_puzzles; it needs a C compiler")
        )

    stand_in = ModuleType("pycosat")
    # find_spec fails for a loaded module without a spec.
    stand_in.__spec__ = ModuleSpec("pycosat", loader=None)
    stand_in.solve = stand_in.itersolve = absent  # type: ignore[attr-defined]
    sys.modules["pycosat"] = stand_in


def _suggest(task: str, names: list[str]) -> str:
    """Suggest the three nearest names; a few well-known ones when none is near."""
    near = get_close_matches(task, names, n=3, cutoff=0.5)
    return (
        f"did you mean {' or '.join(near)}?" if near else f"there are {len(names)}: chain_sum, gsm_symbolic, sudoku, …"
    )
