"""The pool with a handler of its own, and the parts that a call cannot show."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.errors import ConfigError
from posttrain.rewards.workers import fork_gate, processes, wire
from posttrain.rewards.workers.limits import Limits
from posttrain.rewards.workers.pool import Answer, Failure, Reply, WorkerPool

# A module of handlers. `loaded` says in which process it was loaded.
SOURCE = """
import os, subprocess, sys, threading, time
loaded = os.getpid()

def echo(setup):
    print("x" * 100_000)  # more than a pipe holds
    return lambda call: [setup, call, os.getpid(), loaded]

def with_thread(setup):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    return echo(setup)

class Helped:
    def __init__(self, setup): pass
    def after_fork(self):
        self.helper = subprocess.Popen(["sleep", "100"])
    def __call__(self, call):
        started = subprocess.Popen(["sleep", "100"]) if call == "start another" else None
        return [self.helper.pid, started.pid if started else 0]

def refuses(setup):
    from posttrain.errors import ConfigError, Problem
    raise ConfigError(Problem("it cannot be", fix="change it", field="terms.0.path"))

def raises(setup):
    raise ValueError("no good")

def ends(setup):
    print("said at last", file=sys.stderr, flush=True)
    os._exit(7)

def environment(setup):
    return lambda call: [*(os.environ.get(name) for name in call), {"torch", "transformers"} & set(sys.modules)]

def forks(setup):
    return lambda call: [subprocess.run(["echo", str(n)], capture_output=True, text=True).stdout for n in range(call)]
"""

Make = Callable[..., WorkerPool]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    (tmp_path / "handlers_of_the_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    pools: list[WorkerPool] = []

    def start(name: str, setup: Any = None, workers: int = 1, **limits: Any) -> WorkerPool:
        settings = Limits(**{"wall_s": 5.0, **limits})
        pools.append(WorkerPool(f"handlers_of_the_test:{name}", setup, workers=workers, limits=settings))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def value(reply: Future[Reply]) -> Any:
    found = reply.result()
    assert isinstance(found, Answer), found
    return found.value


def gone(pids: list[int]) -> bool:
    """Whether they have ended; one that was killed a moment ago may need another."""
    deadline = time.monotonic() + 5
    while processes.usage(pids).processes and time.monotonic() < deadline:
        time.sleep(0.01)
    return processes.usage(pids).processes == 0


def test_what_crosses_comes_back_equal(make: Make) -> None:
    pool = make("echo", {"a": (1, 2)})
    call = {
        "t": (1, [2.5, None]),
        "b": b"\0\xff",
        "d": Decimal("1.50"),
        "w": datetime(2020, 1, 2, 3),
        "y": date(2020, 1, 2),
    }
    call |= {"m": {1: "a", (2, 3): {"~": 1}}, "s": {1, 2}, "l": timedelta(days=1, seconds=2), "u": "half \ud800"}
    setup, back, worker, loaded = value(pool.submit(call))
    assert (setup, back) == ({"a": (1, 2)}, call)
    assert worker not in (os.getpid(), loaded)  # forked from the process that has loaded
    assert value(pool.submit(math.inf))[1] == math.inf
    assert value(pool.submit(np.arange(3)))[1] == [0, 1, 2]
    assert pool.submit(object()).result() == Failure("exception", "a object cannot be handed to another process")


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"{", b"\xff", b'{"~": "nothing", "of": 1}', b'{"~": "decimal", "of": "x"}']
)
def test_what_no_worker_writes_is_refused_and_not_run(data: bytes) -> None:
    with pytest.raises(ValueError):
        wire.from_bytes(data)


def test_a_frame_longer_than_allowed_is_not_read() -> None:
    with pytest.raises(wire.TooLong):
        wire.take_frame(bytearray(b"\xff\xff\xff\xff"), most=1000)
    buffer = bytearray(wire.frame(b"abc") + wire.frame(b"d"))
    assert (wire.take_frame(buffer, 10), wire.take_frame(buffer, 10), wire.take_frame(buffer, 10)) == (
        b"abc",
        b"d",
        None,
    )


def test_workers_are_clean_processes(make: Make) -> None:
    pool = make("environment")
    names = ["OMP_NUM_THREADS", "PYTHONHASHSEED", "PATH"]
    assert value(pool.submit(names)) == ["1", "0", os.environ["PATH"], set()]


def test_loading_that_starts_a_thread_is_done_in_the_worker(make: Make) -> None:
    """A fork would not take the thread along."""
    _, _, worker, loaded = value(make("with_thread").submit(1))
    assert worker == loaded


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("refuses", "it cannot be; change it"),
        ("raises", "loading in a worker failed: ValueError: no good"),
        ("missing", "loading in a worker failed: AttributeError: .*missing"),
        ("ends", "a worker for rewards ended while it was loading; it printed: said at last"),
    ],
)
def test_loading_that_fails_says_why(make: Make, name: str, message: str) -> None:
    pool = make(name)
    with pytest.raises(ConfigError, match=message) as raised:
        pool.check()
    assert name != "refuses" or raised.value.problems[0].field == "terms.0.path"
    failure = pool.submit(1).result()
    assert isinstance(failure, Failure) and failure.reason == "crashed" and "could not be made" in failure.detail


@pytest.mark.skipif(not processes.LINUX, reason="descendants are found by way of /proc")
def test_what_a_call_starts_ends_with_it_and_what_loading_starts_stays(make: Make) -> None:
    pool = make("Helped")
    helper, started = value(pool.submit("start another"))
    assert value(pool.submit("")) == [helper, 0]
    assert processes.usage([helper]).processes == 1
    assert gone([started])
    pool.close()
    assert gone([helper])


def test_programs_may_be_started_one_after_the_other(make: Make) -> None:
    """More than the limit of processes, but not at once."""
    assert value(make("forks", processes=4).submit(12)) == [f"{n}\n" for n in range(12)]


def test_calls_from_many_threads(make: Make) -> None:
    pool = make("echo", workers=2)
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: value(pool.submit(n))[1]})) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: n for n in range(20)}


def test_a_call_after_closing_fails(make: Make) -> None:
    pool = make("echo")
    pool.check()
    pool.close()
    assert pool.submit(1).result(timeout=5) == Failure("crashed", "the workers were closed")


@pytest.mark.skipif(not processes.LINUX, reason="marks are found by way of /proc")
def test_workers_end_when_the_trainer_is_killed(make: Make, tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from posttrain.rewards.workers.limits import Limits\n"
        "from posttrain.rewards.workers.pool import WorkerPool\n"
        "pool = WorkerPool('handlers_of_the_test:echo', 1, workers=2, limits=Limits())\n"
        "print(*[pool.submit(n).result().value[2] for n in range(4)], flush=True)\n"
        "time.sleep(100)\n"
    )
    make("echo")  # writes the module
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert processes.usage(workers).processes
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert gone(workers)


@pytest.mark.skipif(not processes.LINUX, reason="descendants are found by way of /proc")
def test_a_bomb_without_a_gate_is_killed_as_well() -> None:
    """Where the kernel has no gate for forks: 60 processes that fork on, each in a session of its own, for 3 seconds."""
    program = (
        "import os, sys, time\n"
        "from posttrain.rewards.workers import processes\n"
        "processes.adopt_orphans()\n"
        "end, gave_up = time.monotonic() + 3, time.monotonic() + 3\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while time.monotonic() < end:\n"
        "        if len(os.listdir('/proc')) < int(sys.argv[1]) and os.fork() == 0:\n"
        "            os.setsid()\n"
        "        time.sleep(0.002)\n"
        "    os._exit(0)\n"
        "time.sleep(0.3)\n"
        "processes.kill_all_descendants()\n"
        "print(time.monotonic() < gave_up, processes.has_children())\n"
    )
    most = str(len(os.listdir("/proc")) + 60)
    done = subprocess.run([sys.executable, "-c", program, most], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_where_there_is_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_gate.platform, "machine", lambda: "riscv64")
    assert fork_gate.close_gate() is None
