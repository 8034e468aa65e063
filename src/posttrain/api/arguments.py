"""Checks of the verbs' arguments: one error for what a caller passed, before a model sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from pydantic import Field
from torch import Tensor

from posttrain.api.kinds import check_kind
from posttrain.config.reading.sources import SourceMap
from posttrain.config.reading.validate import validate
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import Problem, RequestError, did_you_mean
from posttrain.records.batches import ShapedBatch
from posttrain.records.trajectories import SamplingParams


class CallSampling(RolloutConfig):
    """The sampling that a call may change: that of a configuration, with its limits, and what a run sets by itself."""

    seed: int = 0
    extra_episodes: int = Field(default=0, ge=0)
    prompt_logprobs: bool = False


def with_changes(sampling: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """Change the sampling of the configuration. Raises: RequestError for an unknown name and for a value out of range."""
    names = [each.name for each in fields(SamplingParams)]
    problems = [
        Problem(f"sampling has no {name}", fix=did_you_mean(name, names) or f"it has {names}")
        for name in changes
        if name not in names
    ]
    known = {
        name: list(value) if isinstance(value, tuple) else value for name, value in changes.items() if name in names
    }
    checked, found = validate(known, SourceMap(None, {}), CallSampling)
    if problems or found:
        raise RequestError([*problems, *found])
    values: dict[str, Any] = {}
    for name in known:
        value = getattr(checked, name)
        values[name] = tuple(value) if isinstance(value, list) else value
    return replace(sampling, **values)


def check_advantages(shaped: ShapedBatch, advantages: Any) -> None:
    """Raises: RequestError unless advantages are a tensor [B] or [B, T] of this batch."""
    check_kind(advantages, Tensor, "advantages", "write torch.tensor(...)")
    mask = shaped.sequences.response_mask
    shape = tuple(advantages.shape)
    if shape not in (tuple(mask.shape[:1]), tuple(mask.shape)):
        rows, length = mask.shape
        raise RequestError(
            f"advantages are of shape [{rows}], one per response, or [{rows}, {length}], one per token, not {list(shape)}"
        )


def check_rewards(rewards: Any, sizes: Sequence[int]) -> None:
    """Raises: RequestError unless rewards are as many numbers for each group as it has responses."""
    rows = [list(each) for each in rewards if _is_row(each)] if _is_row(rewards) else []
    if not _is_row(rewards) or len(rows) != len(rewards) or [len(each) for each in rows] != list(sizes):
        raise RequestError(f"rewards must be one list per group, of {list(sizes)} numbers, not {_described(rewards)}")
    for value in (value for row in rows for value in row):
        try:
            float(value)
        except (TypeError, ValueError):
            raise RequestError(Problem(f"a reward is a number, not {value!r}", fix="nan is an invalid one")) from None


def _is_row(value: Any) -> bool:
    """True for what can be read in order: lists, tuples, arrays and tensors."""
    return not isinstance(value, str | Mapping) and hasattr(value, "__len__") and hasattr(value, "__iter__")


def _described(rewards: Any) -> str:
    if not _is_row(rewards):
        return type(rewards).__name__
    return str([len(each) if _is_row(each) else type(each).__name__ for each in rewards])
