"""Which calls are made when a call about many responses fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from posttrain.records.trajectories import Invalid
from posttrain.rewards.bisection import call_with_bisection


class Function:
    """Fails when it is asked about a culprit; else says each place times ten."""

    def __init__(self, culprits: set[int], reason: str = "exception"):
        self.culprits = culprits
        self.reason = reason
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, ranges: Sequence[range]) -> list[list[int] | Invalid]:
        self.calls += map(tuple, ranges)
        return [
            Invalid(self.reason) if self.culprits & set(each) else [place * 10 for place in each] for each in ranges
        ]


def test_one_culprit_of_eight_takes_six_further_calls() -> None:
    function = Function({5})
    found = call_with_bisection(8, function, halve=True)
    assert found == [0, 10, 20, 30, 40, Invalid("exception"), 60, 70]
    # 8 -> 4 + 4 -> 2 + 2 -> 1 + 1
    assert function.calls == [tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7), (4, 5), (6, 7), (4,), (5,)]


def test_without_halving_all_fail_with_the_one_call() -> None:
    function = Function({5})
    assert call_with_bisection(8, function, halve=False) == [Invalid("exception")] * 8
    assert len(function.calls) == 1
    assert call_with_bisection(0, function, halve=True) == []


@pytest.mark.parametrize(("reason", "most"), [("exception", 2 * 64 + 1), ("timeout", 2 * 18 + 1)])
def test_a_function_that_always_fails_is_given_up(reason: str, most: int) -> None:
    """64 responses: after 64 failed calls, or 4 + 2 x 7 = 18 that ran out of time, no further halves are made."""
    function = Function(set(range(64)), reason)
    assert call_with_bisection(64, function, halve=True) == [Invalid(reason)] * 64
    assert 18 <= len(function.calls) <= most
