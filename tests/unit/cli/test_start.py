"""Ctrl-C is heard wherever it falls."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable

import pytest

from posttrain.cli import app, start
from posttrain.cli.start import interrupt


class Slow:
    """A cycle, so that the collector runs its ``__del__``, which is interrupted."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_in_a_finalizer_comes_a_moment_later(capfd: pytest.CaptureFixture[str]) -> None:
    """Python alone would print a traceback for the finalizer and lose the interrupt."""
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        Slow()
        with pytest.raises(KeyboardInterrupt):
            gc.collect()
            time.sleep(5)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_ctrl_c_in_a_callback_of_the_collector_comes_a_moment_later() -> None:
    calls: list[str] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        if not calls:
            calls.append(phase)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt):
            gc.collect()
            time.sleep(5)
    finally:
        gc.callbacks.remove(callback)
        signal.signal(signal.SIGINT, before)
    assert calls == ["start"]


def test_ctrl_c_before_a_command_is_chosen_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """typer has parsed nothing yet, so that no command can catch it."""

    def interrupted(_: Callable[[], object]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run_guarded", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            start.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert capfd.readouterr().err == "posttrain: stopped at once\n"


def test_ctrl_c_elsewhere_comes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT, None)


def test_typer_builds_the_requested_command_alone() -> None:
    """And all of them for another word: the help, a slip of the finger."""
    alone = app.with_only("plan")
    assert [each.name for each in alone.registered_commands] == ["plan"] and not alone.registered_groups
    group = app.with_only("data")
    assert [each.name for each in group.registered_groups] == ["data"] and not group.registered_commands
    assert [each.name for each in app.with_only("--version").registered_commands] == ["version"]
    assert all(app.with_only(word) is app.app for word in ("", "--help", "plam"))
    assert len(app.app.registered_commands) > 10 and app.app.registered_groups
