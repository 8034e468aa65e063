"""Advantages of estimators that give one number per response (``AdvantageFacts.per_response``): no token is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import Problem, RequestError
from posttrain.records.batches import SequenceBatch
from posttrain.records.plans import AdvantagePlan
from posttrain.records.span_tensors import SpanTensor, first_columns, row_counts, spread
from posttrain.user_files import defined_at


def per_response(
    estimator: Callable[..., Tensor], plan: AdvantagePlan, batch: SequenceBatch, inputs: Mapping[str, Any]
) -> Tensor:
    """The advantages [B, T] of an estimator that gives one number per trajectory, unread where the mask is.

    Of a trajectory it reads the last row, and as its mask as many columns as it has sampled tokens in all of its rows.
    """
    mask, last = inputs["response_mask"], batch.last_rows
    trajectories = last.long().cumsum(0) - last.long()  # [B], counted from 0
    lengths = torch.zeros(int(last.sum()), dtype=torch.int64).index_add(0, trajectories, row_counts(mask))

    def of_trajectories(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: each[last] for name, each in value.items()}
        return value[last]

    width = max(int(lengths.max()), 1)
    given = {name: of_trajectories(value) for name, value in inputs.items() if name != "response_mask"}
    given["response_mask"] = first_columns(lengths, width)
    found = estimator(*(given[name] for name in inputs), **plan.parameters)
    if not isinstance(found, SpanTensor):  # of the user's own
        what = f"{defined_at(estimator)}: {plan.name} is registered with per_response=True, and gives numbers of tokens"
        fix = "return algos.groups.on_tokens(numbers, response_mask), or leave per_response out"
        raise RequestError(Problem(what, fix=fix, field="advantage.name"))
    return spread(torch.from_numpy(found.of_rows)[trajectories], mask)
