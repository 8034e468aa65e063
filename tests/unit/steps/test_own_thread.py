"""A thread that works by itself and answers questions in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from posttrain.errors import RunStopped
from posttrain.steps.own_thread import OwnThread

Make = Callable[..., OwnThread]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[OwnThread] = []

    def started(work: Callable[[], None], timeout_s: float = 30.0) -> OwnThread:
        made.append(OwnThread("the thread", work, timeout_s))
        made[-1].start()
        return made[-1]

    yield started
    for each in made:
        each.stop()


def fail(error: Exception) -> Any:
    raise error


def test_what_is_asked_is_done_in_the_thread(make: Make) -> None:
    thread = make(lambda: time.sleep(0.001))
    assert thread.ask(threading.current_thread) is not threading.current_thread()


@pytest.mark.parametrize("error", [ValueError("no"), TimeoutError("a sampler is late")])
def test_an_error_of_what_is_asked_comes_at_once_and_the_work_continues(make: Make, error: Exception) -> None:
    """Also a TimeoutError, which is no want of an answer."""
    thread = make(lambda: time.sleep(0.001))
    begun = time.monotonic()
    with pytest.raises(type(error), match=str(error)):
        thread.ask(lambda: fail(error))
    assert time.monotonic() - begun < 10
    assert thread.ask(lambda: 1) == 1


def test_an_error_of_the_work_is_raised_for_whoever_asks(make: Make) -> None:
    thread = make(lambda: fail(ValueError("no sampler is left")))
    for _ in range(2):
        with pytest.raises(ValueError, match="no sampler is left"):
            while True:
                thread.ask(lambda: time.sleep(0.001))


def test_a_thread_that_does_not_answer_is_named_with_what_it_waits_for(make: Make) -> None:
    free = threading.Event()
    thread = make(lambda: void(free.wait(30)), timeout_s=0.2)
    try:
        with pytest.raises(RunStopped, match=r"the thread gave no answer within 0.2 s: it waits for sampler 1"):
            thread.ask(lambda: 1, lambda: "sampler 1")
    finally:
        free.set()


def test_work_pauses_and_continues(make: Make) -> None:
    count = [0]

    def work() -> None:
        count[0] += 1
        time.sleep(0.001)

    thread = make(work)
    thread.pause(lambda: count[0] > 3, lambda: "the count")
    held = count[0]
    time.sleep(0.1)
    assert thread.ask(lambda: count[0]) == held > 3
    thread.go()
    until = time.monotonic() + 10
    while count[0] == held and time.monotonic() < until:
        time.sleep(0.01)
    assert count[0] > held


def void(_: object) -> None:
    """Drop a value."""
