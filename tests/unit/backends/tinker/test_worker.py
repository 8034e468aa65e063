"""The order in which requests run, however they arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from posttrain.backends.tinker import worker as module
from posttrain.backends.tinker.worker import Failed, Job, Worker
from posttrain.data.chat_api import Refused


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def job(done: list[str], name: str, **how: object) -> Job:
    def run(given: object) -> list[str]:
        done.append(name)
        return [name]

    return Job(run=run, **how)  # type: ignore[arg-type]


def test_a_client_s_requests_run_by_their_numbers(worker: Worker) -> None:
    done: list[str] = []
    jobs = {number: job(done, f"a{number}") for number in (1, 2, 3)}
    for number in (3, 2):
        worker.submit_in_order("a", number, jobs[number])
    other = job(done, "b1")
    worker.submit_in_order("b", 1, other)
    worker.submit_in_order("a", 1, jobs[1])
    worker.start()
    assert jobs[3].future.result(5) == "a3"
    assert done == ["b1", "a1", "a2", "a3"]


def test_a_failed_request_fails_alone_and_a_refused_one_is_not_waited_for(worker: Worker) -> None:
    def fail(given: object) -> list[str]:
        raise Refused("no")

    done: list[str] = []
    first, third = Job(run=fail), job(done, "third")
    worker.submit_in_order("a", 1, first)
    worker.submit_in_order("a", 2, None)
    worker.submit_in_order("a", 3, third)
    worker.start()
    assert third.future.result(5) == "third"
    with pytest.raises(Failed, match="no") as failed:
        first.future.result(5)
    assert failed.value.category == "user"
    assert worker.alive


def test_an_unexpected_error_is_the_client_s_and_the_server_s_log_s(
    worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(given: object) -> list[str]:
        raise ZeroDivisionError("1/0")

    broken = Job(run=fail)
    worker.submit(broken)
    worker.start()
    with pytest.raises(Failed, match="ZeroDivisionError: 1/0") as failed:
        broken.future.result(5)
    assert failed.value.category == "server"
    assert "Traceback" in capsys.readouterr().err


def test_jobs_with_equal_keys_are_run_together(worker: Worker) -> None:
    seen: list[list[int]] = []

    def run(given: list[int]) -> list[int]:
        seen.append(list(given))
        return [each * 10 for each in given]

    keys = ["x", "y", "x", "x"]
    jobs = [Job(run=run, given=number, key=key) for number, key in enumerate(keys)]  # type: ignore[arg-type]
    for each in jobs:
        worker.submit(each)
    worker.start()
    assert [each.future.result(5) for each in jobs] == [0, 10, 20, 30]
    assert seen == [[0, 2, 3], [1]]


def test_a_request_that_never_comes_fails_those_behind_it(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GAP_S", 0.0)
    monkeypatch.setattr(module, "_IDLE_S", 0.01)
    told: list[str] = []
    late = job([], "late", refused=told.append)
    worker.submit_in_order("a", 2, late)
    worker.start()
    with pytest.raises(Failed, match="request 1 of this client, which goes before it, did not come"):
        late.future.result(5)
    assert len(told) == 1
    after = job([], "after")
    worker.submit_in_order("a", 3, after)
    assert after.future.result(5) == "after"


def test_a_session_s_end_drops_its_requests_and_no_other_s(worker: Worker) -> None:
    began, go_on = threading.Event(), threading.Event()

    def wait(given: object) -> list[str]:
        began.set()
        go_on.wait(5)
        return ["waited"]

    running, dropped, kept = Job(run=wait, owner="s"), job([], "dropped", owner="s"), job([], "kept", owner="t")
    gapped = job([], "gapped", owner="s")
    for each in (running, dropped, kept):
        worker.submit(each)
    worker.submit_in_order("s:train:0", 5, gapped)
    worker.start()
    assert began.wait(5)
    worker.drop("s", ["s:train:0"], "the session has ended")
    go_on.set()
    assert kept.future.result(5) == "kept"
    for each in (dropped, gapped):
        with pytest.raises(Failed, match="the session has ended"):
            each.future.result(5)
