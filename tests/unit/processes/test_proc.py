"""Reading /proc: states, beginnings and waits of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.processes import proc

pytestmark = pytest.mark.skipif(not proc.LINUX, reason="/proc is Linux's")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield child
    child.kill()
    child.wait()


def until(state: str, pid: int) -> bool:
    deadline = time.monotonic() + 10
    while proc.state(pid) != state and time.monotonic() < deadline:
        time.sleep(0.005)
    return proc.state(pid) == state


def test_running_stopped_and_gone(sleeper: subprocess.Popen[bytes]) -> None:
    begun = proc.started(sleeper.pid)
    assert begun is not None and proc.state(sleeper.pid, begun) == "running"
    assert proc.state(sleeper.pid, begun + 1) == "gone"  # another process had this number
    sleeper.send_signal(signal.SIGSTOP)
    assert until("stopped", sleeper.pid) and proc.is_stopped(sleeper.pid)
    sleeper.kill()
    assert until("gone", sleeper.pid)  # also as a zombie, which it is until it is waited for
    assert proc.started(sleeper.pid) is None and proc.usage([sleeper.pid]).processes == 0


def test_processes_of_a_session(sleeper: subprocess.Popen[bytes]) -> None:
    assert proc.of_session(sleeper.pid) == [sleeper.pid]


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not say how long a process waits"
)
def test_waiting_for_a_core_is_not_sleeping(sleeper: subprocess.Popen[bytes]) -> None:
    """Four endless loops on one core wait together for three times as long as they run. A sleeping process does not wait."""
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    try:
        time.sleep(1.5)
        waits, cpu_s = [proc.core_wait_s(loop.pid) for loop in loops], proc.usage([loop.pid for loop in loops]).cpu_s
        assert sum(waits) > 2 * cpu_s > 0
        assert proc.core_wait_s(sleeper.pid) < 0.5 < max(waits)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert proc.core_wait_s(loops[0].pid) == 0.0  # it is gone
