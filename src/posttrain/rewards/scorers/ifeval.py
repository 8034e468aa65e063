"""Instruction following (IFEval): constraints that a program can verify."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial

from posttrain.errors import did_you_mean
from posttrain.interfaces.reward import RewardFn
from posttrain.libraries import json_text
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.constraints import CONSTRAINTS, Constraint
from posttrain.rewards.spans import after_think


@REWARDS.register("ifeval")
def ifeval() -> RewardFn:
    """A reward of 1 when the text after the last </think> (or the whole text) satisfies the constraint of the ground truth,
    else 0; a blank response satisfies none."""
    return _score


def _score(prompt: Prompt, response: str) -> float:
    """Raises: ValueError when the reference names no known constraint or lacks its arguments; MissingDependency when the
    constraint needs a library that is not installed."""
    keeps = constraint(prompt.ground_truth)
    text = after_think(response).lstrip("\n")
    return float(bool(text.strip()) and keeps(text))


def constraint(truth: object) -> Constraint:
    """Build the check that a reference describes: JSON text, or a mapping, with ``func_name`` and the arguments of the
    function; other entries are ignored.

    Raises: ValueError.
    """
    if isinstance(truth, str):
        try:
            truth = json_text.loads(truth)
        except ValueError as error:
            raise ValueError(f"the ground truth is not JSON: {error}") from error
    if not isinstance(truth, Mapping):
        raise ValueError("the ground truth is not a mapping with func_name and arguments")
    name = truth.get("func_name")
    if name not in CONSTRAINTS:
        raise ValueError(f"there is no constraint called {name!r}; {did_you_mean(str(name), CONSTRAINTS)}")
    function = CONSTRAINTS[name]
    wanted = list(inspect.signature(function).parameters)[1:]
    missing = [argument for argument in wanted if truth.get(argument) is None]
    if missing:
        raise ValueError(f"the ground truth of {name} lacks {', '.join(missing)}")
    return partial(function, **{argument: truth[argument] for argument in wanted})
