"""Sends what a run has written to a service, from a thread of its own: RUN_DIR/metrics.jsonl is the spool.

A step never waits for a service. What could not be sent is tried again, at later steps and at the end; what is lacking then
can be sent at any time by ``posttrain report --push``.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain.config import TrainingConfig
from posttrain.config.reading.compose import read_saved
from posttrain.config.tracking import TrackingConfig
from posttrain.dialects.metric_names import with_dialect_names
from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.interfaces.tracker import Uploader
from posttrain.records.tracked_run import TrackedRun
from posttrain.run.durable import write_durably

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0  # between tries; each failure doubles the pause
LAST_PAUSE_S = 0.5  # before the second and last try at the end of a run
PATIENCE_S = 30.0  # that the end of a run waits for what is still being sent


class Relay:
    """See interfaces.tracker.Tracker. It only notes that there is news; everything else is done by its thread."""

    def __init__(self, name: str, uploader: Uploader, folder: Path, patience_s: float = PATIENCE_S):
        self._name = name
        self._folder = folder
        self._patience_s = patience_s
        self._delivery = Delivery(name, uploader, folder)
        self._news = threading.Event()
        self._closing = False
        self._failure = ""  # the last one that was reported
        self._pause_s = FIRST_PAUSE_S
        self._not_before = 0.0
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    def begin(self, config: TrainingConfig, total_steps: int, first_step: int) -> None:
        self._thread.start()
        self._news.set()

    def phase(self, name: str, step: int, total: int | None = None) -> None:
        """No-op: only finished steps are sent."""

    def advance(self, units: int) -> None:
        """No-op: only finished steps are sent."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._news.set()

    def message(self, text: str) -> None:
        """No-op: messages are for interactive trackers only."""

    def close(self) -> None:
        """Send the rest, for at most the patience; then report the steps it lacks."""
        if not self._thread.is_alive():
            return
        self._closing = True
        self._news.set()
        self._thread.join(self._patience_s)
        missing = self._delivery.missing()
        if missing or self._thread.is_alive():
            what = f"does not have {missing} steps of this run" if missing else "has not confirmed the end of this run"
            print_line(
                f"tracker {self._name} {what}; to send it later: posttrain report --push {self._name} {self._folder}"
            )

    def _work(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            closing = self._closing  # read before the work: what comes during it is news again
            if closing:
                if not self._try(closing):  # a short run may have had no try before
                    time.sleep(LAST_PAUSE_S)
                    self._try(closing)
                return
            if time.monotonic() >= self._not_before:
                self._try(closing)

    def _try(self, closing: bool) -> bool:
        """Send what there is. Returns whether that worked."""
        try:
            self._delivery.send_news()
            if closing:
                self._delivery.close()
        except Exception as error:  # noqa: BLE001  # whatever a third-party service raises; it must not end a run
            self._delivery.give_up()
            self._not_before = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            failure = f"{type(error).__name__}: {error}"
            if failure != self._failure:
                self._failure = failure
                print_line(
                    f"tracker {self._name} failed and is tried again later; metrics.jsonl has everything. {failure}"
                )
            return False
        self._pause_s = FIRST_PAUSE_S
        return True


class Delivery:
    """The steps of a run folder that a service was sent. Remembered in RUN_DIR/trackers/NAME.json."""

    def __init__(self, name: str, uploader: Uploader, folder: Path):
        self._uploader = uploader
        self._folder = folder
        self._state = folder / "trackers" / f"{name}.json"
        self._run: TrackedRun | None = None  # None: not open
        self._last_step = -1
        self._position = 0  # in metrics.jsonl, bytes

    def send_news(self) -> int:
        """Open the service, if it is not, and send every step that it lacks. Returns how many."""
        if self._run is None:
            self._open()
        assert self._run is not None
        tracking, sent = self._run.tracking, 0
        for step, metrics in self._new_rows():
            if step <= self._last_step:
                continue
            validation = self._folder / "validation" / f"step_{step}.jsonl"
            samples = first_rows(validation, tracking.validation_samples)
            named = with_dialect_names(step, metrics, self._run.config, tracking.dialect_names)
            self._uploader.send(step, named, samples)
            self._last_step = step
            self._remember()
            sent += 1
        return sent

    def close(self) -> None:
        """Tell the service how the run ended, as run.json says."""
        if self._run is not None:
            self._uploader.close(str(about(self._folder).get("status", "done")))
            self._run = None

    def give_up(self) -> None:
        """After a failure: the next try opens the service again."""
        if self._run is not None:
            self._run = None
            with suppress(Exception):  # it has failed already, and that was reported
                self._uploader.close("interrupted")

    def missing(self) -> int:
        """Steps in metrics.jsonl that the service was not sent."""
        if not (self._folder / "metrics.jsonl").exists():
            return 0
        last = self._last_step if self._last_step >= 0 else self._remembered()
        return sum(row["step"] > last for row in _rows(self._folder / "metrics.jsonl"))

    def _open(self) -> None:
        run = tracked_run(self._folder)
        self._last_step = self._uploader.open(run, self._remembered())
        self._run = run
        self._position = 0

    def _new_rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Step and finite metrics of the lines that were not read yet."""
        with (self._folder / "metrics.jsonl").open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    return
                self._position += len(line)
                with suppress(ValueError):  # a line that a crash left
                    row = json.loads(line)
                    yield row.pop("step"), {name: value for name, value in row.items() if _finite(value)}

    def _remembered(self) -> int:
        """The last step that was sent. Steps that the run has done again since then (it resumed from an older checkpoint)
        are sent again where the service can take that."""
        run = about(self._folder)
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
            if state["run_id"] != run["id"]:  # another run that was in this folder
                return -1
            again = run["resumes"][state["resumes"] :] if self._uploader.rewinds else []
            return min([state["last_step"], *(resume["first_step"] - 1 for resume in again)])
        except (OSError, ValueError, LookupError, TypeError):
            return -1

    def _remember(self) -> None:
        assert self._run is not None
        self._state.parent.mkdir(parents=True, exist_ok=True)
        resumes = len(about(self._folder).get("resumes", []))
        state = {"run_id": self._run.run_id, "last_step": self._last_step, "resumes": resumes}
        write_durably(self._state, json.dumps(state))


def push(name: str, uploader: Uploader, folder: Path) -> int:
    """Send a service what it lacks of a run that has ended. Returns the number of steps.

    Raises: RequestError when the folder holds no run; whatever the service raises.
    """
    delivery = Delivery(name, uploader, folder)
    try:
        sent = delivery.send_news()
    except BaseException:
        delivery.give_up()
        raise
    delivery.close()
    return sent


def tracked_run(folder: Path) -> TrackedRun:
    """The run of a folder.

    Raises: RequestError when the folder does not say which run it holds.
    """
    try:
        config, resolved = read_saved(str(folder / "config.yaml"))
        return TrackedRun(
            folder=folder,
            run_id=str(about(folder)["id"]),
            name=str(resolved["run"]["name"]),
            tracking=TrackingConfig.model_validate(resolved["tracking"]),
            config=config,
        )
    except (ConfigError, ValueError, LookupError, TypeError) as error:
        what = f"{folder} holds no run that could be sent: {type(error).__name__}: {error}"
        raise RequestError(Problem(what, fix="name a folder with metrics.jsonl, run.json and config.yaml")) from error


def about(folder: Path) -> dict[str, Any]:
    """run.json; empty when there is none that can be read."""
    with suppress(OSError, ValueError):
        value = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}


def first_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """The first rows of a sample file: the same prompts at every validation. Empty when there is no such file."""
    if not count or not path.exists():
        return []
    return list(islice(_rows(path), count))


def print_line(text: str) -> None:
    """A line for a person, whole although several threads write."""
    sys.stderr.write(text + "\n")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one per line, without a last line that was half-written."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            with suppress(ValueError):
                yield json.loads(line)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
