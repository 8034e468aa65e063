"""The moment in which ``colocate`` admits a group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from posttrain.asynchrony.ledger import Bounds
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams
from posttrain.steps.open_groups import OpenGroups

SAMPLES = 2


class Loader:
    """A prompt per draw."""

    def __init__(self) -> None:
        self.draws = 0

    def next(self, domains: None = None) -> list[Prompt]:
        self.draws += 1
        return [cast(Any, SimpleNamespace(prompt_id=f"p{self.draws}", token_ids=(1,), images=None, data_source=""))]


def groups_of(bounds: Bounds) -> OpenGroups:
    nothing = cast(Any, SimpleNamespace(worlds=None))
    sampling = SamplingParams(samples_per_prompt=SAMPLES, max_response_tokens=4)
    return OpenGroups(nothing, nothing, cast(Any, Loader()), {}, bounds, lambda draw: sampling, wait_timeout_s=1.0)


def admitted_with(slots: int, bounds: Bounds) -> int:
    groups = groups_of(bounds)
    while groups.may_admit(slots):
        groups.admit()
    return groups.ledger.admitted


@pytest.mark.parametrize(
    ("slots", "admitted"),
    [
        pytest.param(1, 2, id="the step needs both, although no slot is free"),
        pytest.param(4, 2, id="all slots are taken by the step's own"),
        pytest.param(5, 3, id="one slot is free, and a group begins in it"),
        pytest.param(8, 4, id="two more fill the slots"),
        pytest.param(99, 6, id="slots are free, and the bound is reached"),
    ],
)
def test_a_group_is_admitted_for_the_step_or_into_a_free_slot(slots: int, admitted: int) -> None:
    """With two samples per group, two groups per step, and S = 2."""
    assert admitted_with(slots, Bounds(groups_per_step=2, staleness=2, total_steps=9)) == admitted


def test_the_last_step_admits_nothing_into_free_slots() -> None:
    assert admitted_with(99, Bounds(groups_per_step=2, staleness=2, total_steps=1)) == 2


def test_samples_that_are_gone_take_no_slot() -> None:
    groups = groups_of(Bounds(groups_per_step=1, staleness=2, total_steps=9))
    groups.admit()
    assert not groups.may_admit(slots=SAMPLES)
    groups.flying.drop(0)
    assert groups.may_admit(slots=SAMPLES)
