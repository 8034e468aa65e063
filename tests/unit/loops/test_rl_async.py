"""Metrics of the asynchronous loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from posttrain.asynchrony.ledger import Bounds
from posttrain.asynchrony.pending import Entry
from posttrain.loops.rl_async import at_bound


@pytest.mark.parametrize(
    ("bound", "started", "share"),
    [
        (2, [3, 3, 4, 5], 2 / 4),
        (2, [3, 3, 3, 3], 1.0),
        (1.5, [3, 3, 4, 5], 1.0),  # half of a step may be 2 steps old, and is
        (1.5, [3, 4, 5, 5], 1 / 2),
        (1.5, [3], 1.0),  # a filter has left one of four
    ],
)
def test_share_of_the_groups_that_may_be_at_the_bound(bound: float, started: list[int], share: float) -> None:
    """Five steps are trained, so groups that started after the third are 2 steps old."""
    consumed = [
        Entry(serial=number, prompt_id=str(number), draw=1, started=steps) for number, steps in enumerate(started)
    ]
    ledger = SimpleNamespace(bounds=Bounds.of(bound, groups_per_step=4, total_steps=9))
    sampler: Any = SimpleNamespace(ledger=ledger, consumed=consumed)
    assert at_bound(cast(Any, sampler), 5) == {"async/at_bound_share": pytest.approx(share)}


@pytest.mark.parametrize("bound", [0, 0.5, 1])
def test_up_to_one_step_there_is_no_share(bound: float) -> None:
    """All that is sampled ahead is one step old then, which is no reason for an alarm."""
    bounds = Bounds.of(bound, groups_per_step=2, total_steps=9)
    sampler: Any = SimpleNamespace(
        ledger=SimpleNamespace(bounds=bounds), consumed=[Entry(serial=0, prompt_id="p", draw=1, started=4)]
    )
    assert at_bound(sampler, 5) == {}
