"""Responses as columns: the tokens of many in two arrays, so that no message between processes is pickled token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.records.trajectories import Trajectory

_TOKENS = ("token_ids", "logprobs")
_DEFAULTS = {
    field.name: field.default if field.default_factory is MISSING else field.default_factory()
    for field in fields(Trajectory)
    if field.name not in _TOKENS
}


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Trajectories, in order. The values of the columns come back bit for bit."""

    lengths: NDArray[np.int64]  # [n, 2], token ids and log-probs of each
    token_ids: NDArray[Any]  # of one after the other; int32 where all fit
    logprobs: NDArray[Any]  # in the same order, nats; float32 where that loses nothing
    # The other fields, n values each; a field that has its default in all of them is absent
    others: dict[str, list[Any]]


def to_columns(trajectories: Sequence[Trajectory]) -> Columns:
    lengths = np.array([(len(each.token_ids), len(each.logprobs)) for each in trajectories], np.int64).reshape(-1, 2)
    token_ids = np.fromiter(chain.from_iterable(each.token_ids for each in trajectories), np.int64, lengths[:, 0].sum())
    logprobs = np.fromiter(chain.from_iterable(each.logprobs for each in trajectories), np.float64, lengths[:, 1].sum())
    others = {name: [getattr(each, name) for each in trajectories] for name in _DEFAULTS}
    return Columns(
        lengths=lengths,
        token_ids=_narrow(token_ids, np.int32),
        logprobs=_narrow(logprobs, np.float32),
        others={name: values for name, values in others.items() if any(v is not _DEFAULTS[name] for v in values)},
    )


def from_columns(columns: Columns) -> list[Trajectory]:
    token_ids, logprobs = columns.token_ids.tolist(), columns.logprobs.tolist()
    ids_end = list(accumulate(columns.lengths[:, 0].tolist(), initial=0))
    logprobs_end = list(accumulate(columns.lengths[:, 1].tolist(), initial=0))
    rows = zip(*columns.others.values(), strict=True)
    return [
        Trajectory(
            token_ids=tuple(token_ids[start:end]),
            logprobs=tuple(logprobs[first:last]),
            **dict(zip(columns.others, row, strict=True)),
        )
        for (start, end), (first, last), row in zip(pairwise(ids_end), pairwise(logprobs_end), rows, strict=True)
    ]


def _narrow(values: NDArray[Any], dtype: type[Any]) -> NDArray[Any]:
    """The values in a smaller type, or as they are where one of them has no exact form in it."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(dtype)
    return narrow if np.array_equal(narrow, values, equal_nan=values.dtype.kind == "f") else values
