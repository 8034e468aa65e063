"""Signals before the first step end a run as later ones do: exit code 75."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from posttrain.cli import start
from posttrain.cli.errors import run_guarded
from posttrain.run import early_stop
from posttrain.run.early_stop import SIGNALS, StoppedEarly, heed_signals
from posttrain.run.stopping import StopSignal


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(early_stop, "_heard", [])
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_stops_at_once_and_a_second_one_does_not_disturb(number: signal.Signals) -> None:
    heed_signals()
    with pytest.raises(StoppedEarly, match=f"stopped by {number.name} outside of the steps; start it again"):
        signal.raise_signal(number)
    for again in SIGNALS:
        signal.raise_signal(again)


@pytest.mark.parametrize("command", ["train", "sft", "demo"])
def test_the_command_ends_with_75(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["posttrain", command])
    monkeypatch.setattr("posttrain.cli.app.main", lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(SystemExit) as caught:
        start.main()
    assert caught.value.code == 75
    assert "posttrain: stopped by SIGUSR1 outside of the steps" in capsys.readouterr().err


def test_other_commands_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["posttrain", "plan"])
    monkeypatch.setattr("posttrain.cli.app.main", lambda: None)
    start.main()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stop_that_a_library_has_caught_is_heeded_by_the_loop() -> None:
    heed_signals()
    with suppress(BaseException):  # as a careless library does
        signal.raise_signal(signal.SIGTERM)
    with StopSignal(5.0) as stop:
        assert stop.requested and stop.name == "SIGTERM"


def test_a_forked_child_ends_by_the_signal_itself() -> None:
    heed_signals()
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


def test_nohup_keeps_its_meaning() -> None:
    """nohup starts the command with SIGHUP ignored: the terminal may close, before the steps and in them."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    heed_signals()
    signal.raise_signal(signal.SIGHUP)
    with StopSignal(5.0) as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested


def test_an_error_that_a_library_makes_of_the_stop_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled code that calls Python back raises an error of its own when that is left by an exception."""

    def careless() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:  # noqa: BLE001  # as compiled code does
            raise SystemError("returned NULL without setting an exception") from None

    monkeypatch.setattr(sys, "argv", ["posttrain", "train"])
    monkeypatch.setattr("posttrain.cli.app.main", lambda: sys.exit(run_guarded(careless)))
    with pytest.raises(SystemExit) as caught:
        start.main()
    assert caught.value.code == 75 and "bug" not in capsys.readouterr().err
