"""Sending a run to a service from a thread: failures, hangs, resumes. The services are stand-ins; their files are real."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RequestError
from posttrain.interfaces.tracker import Uploader
from posttrain.records.tracked_run import TrackedRun
from posttrain.run import relay
from posttrain.run.relay import Relay, push

CONFIG = "run:\n  name: r\ntracking:\n  trackers: [x]\n  validation_samples: 2\n"


class Service:
    """Notes what it is sent; fails at the given steps, once each."""

    def __init__(self, fails_at: Sequence[int] = (), *, rewinds: bool = False, never_ready: bool = False) -> None:
        self.rewinds = rewinds
        self.sent: list[tuple[int, dict[str, float], list[str]]] = []
        self.opened: list[int] = []
        self.closed: list[str] = []
        self.fails_at = list(fails_at)
        self.ready = threading.Event()
        if not never_ready:
            self.ready.set()

    def open(self, run: TrackedRun, last_step: int) -> int:
        self.ready.wait()
        self.opened.append(last_step)
        return last_step

    def send(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        if step in self.fails_at:
            self.fails_at.remove(step)
            raise ConnectionError("no network")
        self.sent.append((step, dict(metrics), [sample["sample_id"] for sample in samples]))

    def close(self, status: str) -> None:
        self.closed.append(status)

    @property
    def steps(self) -> list[int]:
        return [step for step, *_ in self.sent]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "metrics.jsonl").write_text("")
    about(tmp_path)
    return tmp_path


def about(folder: Path, run_id: str = "a", resumes: Sequence[int] = ()) -> None:
    entries = [{"first_step": step} for step in resumes]
    (folder / "run.json").write_text(json.dumps({"id": run_id, "resumes": entries, "status": "done"}))


def write(folder: Path, *steps: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "a": step / 2, "b": None, "nonfinite": ["b"]}) + "\n")


def run(service: Service, folder: Path, *steps: int, patience_s: float = 5.0) -> None:
    sender = Relay("x", service, folder, patience_s)
    sender.begin(None, 9, 1)  # type: ignore[arg-type]
    for step in steps:
        write(folder, step)
        sender.log(step, {})
    sender.close()


def test_every_step_is_sent_in_order_with_its_finite_numbers(folder: Path) -> None:
    (folder / "validation").mkdir()
    rows = "".join(json.dumps({"sample_id": f"v{number}"}) + "\n" for number in range(3))
    (folder / "validation/step_2.jsonl").write_text(rows)
    service = Service()
    assert isinstance(service, Uploader)
    run(service, folder, 1, 2, 3)
    assert service.sent == [(1, {"a": 0.5}, []), (2, {"a": 1.0}, ["v0", "v1"]), (3, {"a": 1.5}, [])]
    assert (service.opened, service.closed) == ([-1], ["done"])


def test_what_failed_is_sent_at_the_end_and_the_failure_is_told_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(fails_at=[2])
    sender = Relay("x", service, folder)
    sender.begin(None, 9, 1)  # type: ignore[arg-type]
    write(folder, 1, 2)
    sender.log(2, {})
    until(lambda: service.closed == ["interrupted"])  # given up for now
    write(folder, 3)
    sender.log(3, {})  # the pause is not over
    sender.close()
    assert service.steps == [1, 2, 3]
    assert (service.opened, service.closed) == ([-1, 1], ["interrupted", "done"])
    said = "tracker x failed and is tried again later; metrics.jsonl has everything. ConnectionError: no network\n"
    assert capsys.readouterr().err == said


def test_a_first_failure_at_the_end_of_a_run_is_tried_once_more(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ends before its service has answered has had no try before."""
    service = Service(fails_at=[1], never_ready=True)
    sender = Relay("x", service, folder)
    write(folder, 1, 2)
    sender.begin(None, 9, 1)  # type: ignore[arg-type]
    threading.Timer(0.2, service.ready.set).start()
    sender.close()
    assert (service.steps, service.closed) == ([1, 2], ["interrupted", "done"])
    assert "does not have" not in capsys.readouterr().err


def test_it_is_tried_again_during_the_run_after_a_pause(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "FIRST_PAUSE_S", 0.0)
    service = Service(fails_at=[1, 1])
    sender = Relay("x", service, folder)
    sender.begin(None, 9, 1)  # type: ignore[arg-type]
    write(folder, 1)
    for _ in range(3):
        sender.log(1, {})
        time.sleep(0.05)
    until(lambda: service.steps == [1])
    sender.close()
    assert service.steps == [1]


def test_a_service_that_hangs_holds_up_no_step_and_the_end_only_for_so_long(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(never_ready=True)
    start = time.monotonic()
    run(service, folder, 1, 2, patience_s=0.2)
    assert 0.2 <= time.monotonic() - start < 60
    assert service.sent == []
    said = "tracker x does not have 2 steps of this run; to send it later: posttrain report --push x"
    assert capsys.readouterr().err == f"{said} {folder}\n"
    service.ready.set()


def test_a_failure_at_the_end_is_made_good_by_push(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Service(fails_at=[2, 2, 2]), folder, 1, 2)
    assert "does not have 1 steps" in capsys.readouterr().err
    later = Service()
    assert push("x", later, folder) == 1
    assert (later.steps, later.opened, later.closed) == ([2], [1], ["done"])
    assert push("x", Service(), folder) == 0


@pytest.mark.parametrize(("rewinds", "sent"), [(True, [3, 4, 5]), (False, [5])])
def test_a_run_that_goes_on_from_an_older_checkpoint(folder: Path, rewinds: bool, sent: list[int]) -> None:
    """Steps 1 to 4 were sent; the run goes on after 2. A service keeps what it has, unless it can take it back."""
    run(Service(), folder, 1, 2, 3, 4)
    (folder / "metrics.jsonl").write_text("")
    write(folder, 1, 2)
    about(folder, resumes=[3])
    service = Service(rewinds=rewinds)
    run(service, folder, 3, 4, 5)
    assert service.steps == sent
    again = Service(rewinds=rewinds)
    assert push("x", again, folder) == 0  # the resume is remembered: nothing is taken back a second time


def test_another_run_in_the_folder_is_sent_from_its_beginning(folder: Path) -> None:
    run(Service(), folder, 1, 2)
    (folder / "metrics.jsonl").write_text("")
    about(folder, run_id="b")
    service = Service()
    run(service, folder, 1)
    assert (service.opened, service.steps) == ([-1], [1])


def test_a_half_written_line_is_left_for_later(folder: Path) -> None:
    write(folder, 1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a"')
    service = Service()
    assert push("x", service, folder) == 1


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds no run that could be sent: .*; name a folder with metrics\.jsonl"):
        push("x", Service(), tmp_path)


def until(condition: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
