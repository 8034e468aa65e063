"""Signals, trackers that fail, and the clock."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from posttrain.run.clock import Clock
from posttrain.run.stopping import StopSignal
from posttrain.run.trackers import Trackers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_first_signal_asks_and_second_leaves(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested and stop.name == number.name
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert stop.name == number.name
    assert signal.getsignal(number) is before


def test_a_second_signal_inside_the_handler_of_the_first_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopSignal():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_signal_says_what_happens_next(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignal():
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "\nSIGINT: saving and stopping, in at most 60 s; again to stop at once, unsaved\n"


def test_the_first_signal_does_not_break_a_live_display() -> None:
    """Written past it, the two lines moved the cursor, and the block was drawn twice."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=60)
    with Live("a\nb", console=console, refresh_per_second=0.01, redirect_stderr=True) as live, StopSignal():
        live.refresh()
        signal.raise_signal(signal.SIGINT)
    lines = shown.getvalue().split("SIGINT: saving and stopping")
    assert len(lines) == 2
    assert lines[0].endswith("\x1b[2K"), "the block is erased before the line is written"
    assert "a\r\nb" in lines[1].replace("\n", "\r\n"), "and drawn again below it"


def test_handlers_are_put_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="inside"), StopSignal():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGTERM) is before


class Noting:
    """Notes what it is told; fails from the given call on."""

    def __init__(self, fail_from: int = 1000) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.fail_from = fail_from

    def _note(self, *what: Any) -> None:
        if len(self.told) + 1 >= self.fail_from:
            raise ConnectionError("no network")
        self.told.append(what)

    def begin(self, config: Any, total_steps: int, first_step: int) -> None:
        self._note("begin", total_steps, first_step)

    def phase(self, name: str, step: int, total: int | None = None) -> None:
        self._note("phase", name, step, total)

    def advance(self, units: int) -> None:
        self._note("advance", units)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note("log", step)

    def message(self, text: str) -> None:
        self._note("message", text)

    def close(self) -> None:
        self._note("close")


def test_failing_optional_tracker_is_switched_off_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    required, failing, fine = Noting(), Noting(fail_from=2), Noting()
    trackers = Trackers([required], [failing, fine])
    trackers.begin(None, 5, 1)  # type: ignore[arg-type]
    trackers.log(1, {})
    trackers.log(2, {})
    trackers.close()
    everything = [("begin", 5, 1), ("log", 1), ("log", 2), ("close",)]
    assert required.told == fine.told == everything
    assert failing.told == [("begin", 5, 1)]
    assert capsys.readouterr().err == "tracker Noting failed and is switched off: ConnectionError: no network\n"


def test_messages_are_in_the_users_words() -> None:
    tracker = Noting()
    Trackers([tracker], [], lambda text: text.replace("run.total_steps", "trainer.total_training_steps")).message(
        "raise run.total_steps"
    )
    assert tracker.told == [("message", "raise trainer.total_training_steps")]


def test_failing_required_tracker_stops_the_run() -> None:
    with pytest.raises(ConnectionError):
        Trackers([Noting(fail_from=1)], []).log(1, {})


def test_clock_adds_up_phases_and_tells_the_trackers() -> None:
    tracker = Noting()
    clock = Clock(Trackers([], [tracker]), step=3)
    for _ in range(2):
        with clock.phase("rollout", total=10):
            clock.advance(4)
    with pytest.raises(ValueError, match="inside"), clock.phase("reward"):
        raise ValueError("inside")
    told = [("phase", "rollout", 3, 10), ("advance", 4)] * 2 + [("phase", "reward", 3, None)]
    assert tracker.told == told
    metrics = clock.metrics()
    assert set(metrics) == {"time/rollout_s", "time/reward_s", "time/step_s"}
    assert 0 < metrics["time/rollout_s"] + metrics["time/reward_s"] <= metrics["time/step_s"]


def test_phases_in_two_lanes_overlap_and_count_each_for_itself() -> None:
    """Sampling goes on beside an update: both durations are whole, and the time in which something was done counts once."""
    clock, sampling, updated = Clock(Trackers([], []), step=1), threading.Event(), threading.Event()

    def sample() -> None:
        with clock.phase("rollout", lane="sampler"):
            sampling.set()
            updated.wait(5)

    thread = threading.Thread(target=sample)
    thread.start()
    sampling.wait(5)
    with clock.phase("update"):
        time.sleep(0.02)
    updated.set()
    thread.join()
    seconds = clock.seconds()
    assert set(seconds) == {"rollout", "update"} and seconds["rollout"] > seconds["update"] >= 0.02
    assert clock.busy_s() == pytest.approx(seconds["rollout"], abs=1e-6)  # the update lies within it
