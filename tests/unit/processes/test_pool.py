"""The pool with a handler of its own, and the parts that a call cannot show."""

from __future__ import annotations

import hashlib
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.errors import ConfigError
from posttrain.processes import descendants, fork_gate, frames, proc, wire, worker
from posttrain.processes import pool as pool_module
from posttrain.processes.limits import Limits
from posttrain.processes.pool import Answer, CallFailure, Reply, WorkerPool
from posttrain.processes.replies import Replies
from posttrain.processes.waiting import Waiting, WaitingCalls, frame_of

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

def begins_a_thread(setup):
    import _thread
    ways = {"none": lambda: None, "thread": lambda: threading.Thread(target=time.sleep, args=(9,), daemon=True).start(),
            "raw": lambda: (_thread.start_new_thread(time.sleep, (9,)), time.sleep(0.1)),
            "joined": lambda: [call() for each in [threading.Thread(target=int)] for call in (each.start, each.join)]}
    return lambda call: [bool(ways[call]()), os.getpid()]

def stops_its_keeper(setup):
    import signal
    return lambda call: os.kill(os.getppid(), signal.SIGSTOP) if call == "stop" else len(call)

def answers_twice(setup):
    def handler(call):
        if call == "twice":
            frame = bytes([0, 0, 0, 2]) + b"A7"
            for fd in range(3, 64):
                try: os.write(fd, frame) if "pipe" in os.readlink(f"/proc/self/fd/{fd}") else None
                except OSError: pass
        return call
    return handler

def draws(setup):
    import random
    from posttrain.processes import worker
    frames, read = [], worker.read_frame
    worker.read_frame = lambda *given: [frames.append(1), read(*given)][1]
    return lambda call: [call, random.random(), os.getpid(), len(frames)]

def fatal(setup):
    ways = {"": lambda: 0, "exit": lambda: os._exit(3), "raise": lambda: {}[0], "long": lambda: "x" * 20_000,
            "loop": lambda: [None for _ in iter(int, 1)],
            "thread": lambda: threading.Thread(target=time.sleep, args=(9,), daemon=True).start() or 0}
    return lambda call: ways[call]()

class Doubler:  # of a module that a new Python does not find
    def __call__(self, n): return 2 * n

def pools(setup):
    import multiprocessing, types
    hidden = sys.modules["hidden_here"] = types.ModuleType("hidden_here")
    hidden.Doubler, Doubler.__module__ = Doubler, "hidden_here"
    def handler(call):
        with multiprocessing.get_context(call).Pool(2) as pool:
            return pool.map(Doubler(), [1, 2, 3])
    return handler

def sleeps(setup):
    return lambda call: [time.sleep(call), os.getpid()][1]

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
    while proc.usage(pids).processes and time.monotonic() < deadline:
        time.sleep(0.01)
    return proc.usage(pids).processes == 0


def said_by_killed(program: str) -> list[int]:
    """Run a trainer's program until it has printed pids of processes that are there, and kill it. Returns: these."""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert proc.usage(pids).processes
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    return pids


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
    assert pool.submit(object()).result() == CallFailure("exception", "a object cannot be handed to another process")


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"{", b"\xff", b'{"~": "nothing", "of": 1}', b'{"~": "decimal", "of": "x"}']
)
def test_what_no_worker_writes_is_refused_and_not_run(data: bytes) -> None:
    with pytest.raises(ValueError):
        wire.from_bytes(data)


def test_a_frame_longer_than_allowed_is_not_read() -> None:
    with pytest.raises(frames.FrameTooLong):
        frames.take_frame(bytearray(b"\xff\xff\xff\xff"), most=1000)
    buffer = bytearray(frames.frame(b"abc") + frames.frame(b"d"))
    assert (frames.take_frame(buffer, 10), frames.take_frame(buffer, 10), frames.take_frame(buffer, 10)) == (
        b"abc",
        b"d",
        None,
    )


def test_workers_are_clean_processes(make: Make) -> None:
    pool = make("environment")
    names = ["OMP_NUM_THREADS", "PYTHONHASHSEED", "PATH"]
    assert value(pool.submit(names)) == ["1", "0", os.environ["PATH"], set()]


def test_names_that_are_hidden_are_not_in_the_environment(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    make("environment")  # writes the module
    pool = WorkerPool(
        "handlers_of_the_test:environment", None, workers=1, limits=Limits(), withheld=["JUDGE_KEY", "NONE"]
    )
    try:
        assert value(pool.submit(["JUDGE_KEY", "PATH"])) == [None, os.environ["PATH"], set()]
    finally:
        pool.close()


@pytest.mark.parametrize(("begins", "replaced"), [("none", False), ("joined", False), ("thread", True), ("raw", True)])
def test_a_worker_with_a_thread_left_in_it_is_replaced(make: Make, begins: str, replaced: bool) -> None:
    pool = make("begins_a_thread")
    first, second = (value(pool.submit(call))[1] for call in (begins, "none"))
    assert (first != second) is replaced


def test_a_second_answer_to_one_call_is_not_the_answer_to_the_next(make: Make) -> None:
    pool = make("answers_twice")
    assert isinstance(pool.submit("twice").result(), CallFailure)
    assert [value(pool.submit(call)) for call in ("a", "b", "c")] == ["a", "b", "c"]


@pytest.mark.slow
def test_a_keeper_that_was_stopped_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when more is to be written to it than a pipe holds."""
    monkeypatch.setattr(pool_module, "GRACE_S", 0.3)
    pool = make("stops_its_keeper", wall_s=0.3)
    assert value(pool.submit("1")) == 1
    failure = pool.submit("stop").result(timeout=20)
    assert failure == CallFailure("timeout", "the process that watches the worker does not answer")
    assert value(pool.submit("x" * 10**6)) == 10**6
    keeper = pool._lines[0]._process
    assert keeper is not None
    keeper.send_signal(signal.SIGSTOP)
    assert isinstance(pool.submit("x" * 10**6).result(timeout=20), CallFailure)
    assert value(pool.submit("12")) == 2


def test_a_machine_on_which_nothing_can_be_started_is_told_and_holds_nobody_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    pool = make("echo")
    with pytest.raises(ConfigError, match=r"cannot be started: .*No space left on device"):
        pool.check()
    failure = pool.submit(1).result(timeout=20)
    assert isinstance(failure, CallFailure) and "No space left on device" in failure.detail


def test_what_nobody_has_thought_of_fails_its_call_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make("echo")
    assert value(pool.submit(1))[1] == 1
    read = frames.read_frame

    def once(*_: object) -> bytes:
        monkeypatch.setattr(frames, "read_frame", read)
        raise ArithmeticError("?")

    monkeypatch.setattr(frames, "read_frame", once)
    assert pool.submit(2).result(timeout=20) == CallFailure(
        "crashed", "the worker cannot be reached: ArithmeticError: ?"
    )
    assert value(pool.submit(3))[1] == 3  # and not what was still to be read of 2


@pytest.mark.skipif(not proc.LINUX, reason="elsewhere nothing is found by way of /proc")
def test_without_proc_nothing_is_started(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "PROC", tmp_path / "none")
    with pytest.raises(ConfigError, match="/proc is not mounted; mount it"):
        make("echo")
    assert list(proc.marked("A", "b")) == []


@pytest.mark.skipif(not proc.LINUX, reason="descendants are found by way of /proc")
def test_kernels_that_do_not_list_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "_kernel_lists_children", lambda: False)
    program = "import subprocess, time; subprocess.Popen(['sleep', '60']); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert child.pid in proc.children(os.getpid())
        [grandchild] = proc.descendants(child.pid)
        assert proc.descendants(os.getpid(), without=[child.pid]) == [
            pid for pid in proc.descendants(os.getpid()) if pid not in (child.pid, grandchild)
        ]
        assert grandchild not in proc.descendants(os.getpid(), without=[grandchild])
        descendants.kill([grandchild, child.pid])


@pytest.mark.skipif(not proc.LINUX, reason="the kernel tells a process of its parent's end on Linux")
def test_a_trainer_that_is_killed_while_a_module_is_imported_leaves_no_keeper(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "imported_for_ever.py").write_text(
        f"import os, time\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)\n"
    )
    program = (
        "from posttrain.processes.limits import Limits\nfrom posttrain.processes.pool import WorkerPool\n"
        "WorkerPool('imported_for_ever:x', None, workers=1, limits=Limits(wall_s=5.0)).check()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(tmp_path)}) as trainer:
        until = time.monotonic() + 60
        while not (begun.exists() and begun.read_text()):
            assert trainer.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        keeper = int(begun.read_text())
        assert keeper in proc.descendants(trainer.pid)
        trainer.kill()
    while (state := proc.PROC / str(keeper) / "stat").exists() and state.read_text().rpartition(")")[2].split()[
        0
    ] != "Z":
        assert time.monotonic() < until
        time.sleep(0.02)


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
    assert isinstance(failure, CallFailure) and failure.reason == "crashed" and "could not be made" in failure.detail


@pytest.mark.skipif(not proc.LINUX, reason="descendants are found by way of /proc")
def test_what_a_call_starts_ends_with_it_and_what_loading_starts_stays(make: Make) -> None:
    pool = make("Helped")
    helper, started = value(pool.submit("start another"))
    assert value(pool.submit("")) == [helper, 0]
    assert proc.usage([helper]).processes == 1
    assert gone([started])
    pool.close()
    assert gone([helper])


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_pool_of_the_users_has_the_workers_modules(make: Make, method: str) -> None:
    assert value(make("pools").submit(method)) == [2, 4, 6]


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
    assert pool.submit(1).result(timeout=5) == CallFailure("crashed", "the workers were closed")


@pytest.mark.skipif(not proc.LINUX, reason="marks are found by way of /proc")
def test_workers_end_when_the_trainer_is_killed(make: Make, tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from posttrain.processes.limits import Limits\n"
        "from posttrain.processes.pool import WorkerPool\n"
        "pool = WorkerPool('handlers_of_the_test:echo', 1, workers=2, limits=Limits())\n"
        "print(*[pool.submit(n).result().value[2] for n in range(4)], flush=True)\n"
        "time.sleep(100)\n"
    )
    make("echo")  # writes the module
    workers = said_by_killed(program)
    assert gone(workers)


@pytest.mark.skipif(not proc.LINUX, reason="descendants are found by way of /proc")
@pytest.mark.parametrize(
    "then",
    [
        pytest.param("pool.submit(60)", id="in a call"),
        pytest.param("os.write(keeper.stdin.fileno(), bytes([0, 0, 9, 9, 1]))", id="in half a request"),
    ],
)
def test_no_keeper_outlives_a_killed_trainer_whose_pipes_a_fork_holds(make: Make, tmp_path: Path, then: str) -> None:
    """A call may take 300 s here, and the other ends of the keeper's pipes stay open."""
    program = (
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from posttrain.processes import proc\n"
        "from posttrain.processes.limits import Limits\n"
        "from posttrain.processes.pool import WorkerPool\n"
        "pool = WorkerPool('handlers_of_the_test:sleeps', workers=1, setup=None, limits=Limits(wall_s=300))\n"
        "pool.submit(0).result()\n"
        "keeper = pool._lines[0]._process\n"
        f"{then}\n"
        "time.sleep(0.2)\n"
        "below = proc.descendants(os.getpid())\n"
        "holder = os.fork()\n"
        "if holder: print(holder, *below, flush=True)\n"
        "time.sleep(100)\n"
    )
    make("sleeps")  # writes the module
    holder, *below = said_by_killed(program)
    assert len(below) == 2  # the keeper and its worker
    ended = gone(below)
    descendants.kill([holder])
    assert ended


@pytest.mark.skipif(not proc.LINUX, reason="descendants are found by way of /proc")
def test_a_bomb_without_a_gate_is_killed_as_well() -> None:
    """Where the kernel has no gate for forks: 60 processes that fork on, each in a session of its own, for 3 seconds."""
    program = (
        "import os, sys, time\n"
        "from posttrain.processes import descendants, proc\n"
        "descendants.adopt_orphans()\n"
        "end, gave_up = time.monotonic() + 3, time.monotonic() + 3\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while time.monotonic() < end:\n"
        "        if len(os.listdir('/proc')) < int(sys.argv[1]) and os.fork() == 0:\n"
        "            os.setsid()\n"
        "        time.sleep(0.002)\n"
        "    os._exit(0)\n"
        "time.sleep(0.3)\n"
        "descendants.kill_all_descendants()\n"
        "print(time.monotonic() < gave_up, descendants.has_children())\n"
    )
    most = str(len(os.listdir("/proc")) + 60)
    done = subprocess.run([sys.executable, "-c", program, most], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_where_there_is_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_gate.platform, "machine", lambda: "riscv64")
    assert fork_gate.close_gate() is None


def test_short_calls_cross_together_and_answer_as_alone(make: Make) -> None:
    pool = make("draws", workers=2)
    alone = [value(pool.submit(number, seed=number)) for number in range(40)]
    together = [pool.submit(number, seed=number) for number in range(40)]
    assert [value(reply)[:2] for reply in together] == [found[:2] for found in alone]
    requests = {tuple(value(reply)[2:]) for reply in [pool.submit(0, seed=0) for _ in range(400)]}
    assert len(requests) < 200  # by the worker's count of frames that it has read


@pytest.mark.parametrize("fatal", ["exit", "raise", "thread", "loop", "long"])
def test_a_fatal_call_among_short_ones_fails_alone(make: Make, fatal: str) -> None:
    pool = make("fatal", workers=2, wall_s=1.0, answer_bytes=10_000)
    for _ in range(3):  # until many cross together
        assert [value(reply) for reply in [pool.submit("") for _ in range(100)]] == [0] * 100
    replies = [pool.submit(fatal if number == 50 else "") for number in range(100)]
    found = [reply.result() for reply in replies]
    expected = {"exit": "crashed", "raise": "exception", "loop": "timeout", "long": "output_limit"}
    at_fault = found.pop(50)
    assert (at_fault.reason if isinstance(at_fault, CallFailure) else "") == expected.get(fatal, "")
    assert found == [Answer(0)] * 99


def test_long_calls_are_left_to_the_other_workers(make: Make) -> None:
    pool = make("sleeps", workers=2)
    for _ in range(4):
        for reply in [pool.submit(0.0) for _ in range(100)]:
            value(reply)
    processes = {value(reply) for reply in [pool.submit(0.05) for _ in range(8)]}
    assert len(processes) == 2


def numbers_of(taken: Sequence[WaitingCalls[str]]) -> list[int]:
    """The numbers of calls, which are written as their requests."""
    found = [(each.first + place, request) for each in taken for place, request in enumerate(each.requests)]
    assert all(request == b"%d" % number for number, request in found)
    return [number for number, _ in found]


def submitted(first: int, count: int, replies: Replies[str]) -> WaitingCalls[str]:
    return WaitingCalls([b"%d" % number for number in range(first, first + count)], b"null", replies, first)


def test_closing_answers_calls_that_were_put_back() -> None:
    waiting: Waiting[str] = Waiting(1)
    replies: Replies[str] = Replies(4)
    waiting.put(submitted(0, 4, replies))
    first = waiting.take()
    assert numbers_of(first) == [0]
    assert not waiting.answered(first, 1, 0.0)
    both = waiting.take()
    assert numbers_of(both) == [1, 2]
    assert numbers_of(waiting.close()) == [3]
    assert numbers_of(waiting.answered(both, 1, 0.0)) == [2]
    assert not waiting.put(submitted(0, 1, replies)) and waiting.take() == []


def test_calls_of_several_submissions_are_taken_together_and_made_alone_after_a_failure() -> None:
    waiting: Waiting[str] = Waiting(1)
    replies: Replies[str] = Replies(11)
    for first, count in ((0, 3), (3, 5), (8, 3)):
        waiting.put(submitted(first, count, replies))
    order = []
    for together in (1, 2, 4):  # twice as many after short calls
        taken = waiting.take()
        assert len(numbers_of(taken)) == together
        order += numbers_of(taken)
        if together < 4:
            waiting.answered(taken, together, 0.0)
    assert order == list(range(7))
    waiting.answered(taken, 2, 0.0)  # the worker has answered 3 and 4, and was replaced
    again = waiting.take()
    assert numbers_of(again) == [5]
    waiting.answered(again, 1, 0.0)
    both = waiting.take()
    assert numbers_of(both) == [6, 7]
    waiting.answered(both, 0, 0.0)  # something has happened to it in one of them
    alone = [waiting.take(), waiting.take()]
    assert [numbers_of(each) for each in alone] == [[6], [7]] and all(each[0].alone for each in alone)
    assert numbers_of(waiting.take()) == [8]


def test_each_of_several_workers_gets_a_share() -> None:
    waiting: Waiting[str] = Waiting(4)
    waiting.put(submitted(0, 8, Replies(8)))
    waiting._together = 128
    assert [len(numbers_of(waiting.take())) for _ in range(5)] == [2, 2, 1, 1, 1]


def test_entries_that_calls_share_cross_once_and_reach_each(make: Make) -> None:
    pool = make("echo", workers=2)
    groups = [
        pool.submit_written(
            [wire.to_text({"n": number}) for number in range(10)], range(10), wire.to_text({"of": (1, each)})
        )
        for each in range(20)
    ]
    for each, replies in enumerate(groups):
        answers = [reply.value[1] for reply in replies.all() if isinstance(reply, Answer)]
        assert answers == [{"of": (1, each), "n": number} for number in range(10)]
    calls: list[WaitingCalls[Reply]] = [
        WaitingCalls([b"0", b"1"], b'{"a": 1}', Replies(2)),
        WaitingCalls([b"2"], b"null", Replies(1)),
    ]
    assert frame_of(calls) == b'[[{"a": 1},[0,1]],[null,[2]]]'


def test_a_seed_may_be_made_of_a_name() -> None:
    worker._seed("train.jsonl:17/3")
    named = random.random(), np.random.random()
    # The first four bytes of BLAKE2b of the name, least significant first
    worker._seed(int.from_bytes(hashlib.blake2b(b"train.jsonl:17/3", digest_size=4).digest(), "little"))
    assert (random.random(), np.random.random()) == named


def test_replies_reach_a_watcher_once_each_and_all_in_order() -> None:
    replies: Replies[str] = Replies(3)
    heard: list[tuple[int, str]] = []
    replies.put(2, ["c"])
    replies.watch(lambda number, reply: heard.append((number, reply)))
    assert heard == [(2, "c")]
    replies.put(0, ["a", "b"])
    assert heard == [(2, "c"), (0, "a"), (1, "b")]
    assert replies.all() == ["a", "b", "c"]
    assert Replies(0).all() == []
