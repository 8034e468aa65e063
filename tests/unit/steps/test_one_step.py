"""Waits of a sampler that works a step ahead in a thread of its own: bounded, and named."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from posttrain.asynchrony.ledger import Bounds
from posttrain.errors import RunStopped
from posttrain.steps.one_step import OneStepAhead


class NoClock:
    stopping = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert name == "sampler_wait"
        yield


def waiting(sampling: Future[Any]) -> OneStepAhead:
    nothing = cast(Any, None)
    ahead = OneStepAhead(
        cast(Any, SimpleNamespace(beside=None)),
        nothing,
        cast(Any, SimpleNamespace(epochs=0.0)),
        {},
        Bounds(groups_per_step=1, staleness=1, total_steps=9),
        nothing,
        in_thread=True,
        wait_timeout_s=0.01,
        folder=Path("unused"),
    )
    ahead.start_after(3)
    ahead._sampling, ahead._clock = sampling, cast(Any, NoClock())
    return ahead


def test_a_sampler_that_does_not_end_stops_the_run_by_name() -> None:
    """Step 4 trains while step 5 is sampled."""
    ahead = waiting(Future())
    with pytest.raises(
        RunStopped, match=r"responses of step 5 were not sampled within 0.01 s after this step's updates"
    ):
        ahead.before_sync()
    with pytest.raises(RunStopped, match=r"within 0.01 s after the step was left \(asynchronous.wait_timeout_s\)"):
        ahead.go_back((ahead.ledger.state(), None, False, (0.0, 0.0)))


def test_an_error_of_the_sampler_is_raised_where_it_is_waited_for() -> None:
    failed: Future[Any] = Future()
    failed.set_exception(RunStopped("the server is gone"))
    with pytest.raises(RunStopped, match="the server is gone"):
        waiting(failed).before_sync()
