"""``posttrain train --restarts``: the decision by hand, and the supervisor with programs that end in every way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.cli import restarts
from posttrain.cli.restarts import Ending, no_restart, pause_s, supervise, without_restarts

KILLED, SEGMENTATION = -signal.SIGKILL, -signal.SIGSEGV

# A run: it counts its starts in FOLDER/starts, logs steps, and ends as FOLDER/ends says of each start: a code, or text to raise.
PROGRAM = """
import json, os, signal, socket, sys, time
folder, descriptor = sys.argv[1], int(sys.argv[-1].partition("=")[2])
channel = socket.socket(fileno=descriptor)
if "--standby" in sys.argv and not channel.recv(3):
    sys.exit(0)
starts = open(f"{folder}/starts", "a+")
starts.seek(0)
number = len(starts.read().split())
print(" ".join(sys.argv[2:-1]) or "-", file=starts, flush=True)
tell = lambda **message: channel.sendall(json.dumps(message).encode() + b"\\n")
tell(folder=folder)
with open(f"{folder}/metrics.jsonl", "a") as metrics:
    for step in json.load(open(f"{folder}/steps"))[number]:
        metrics.write(json.dumps({"step": step}) + "\\n")
end = json.load(open(f"{folder}/ends"))[number]
if isinstance(end, str):
    tell(error=end, kind=end.partition(":")[0])
    sys.exit(2 if end.startswith("InUse") else 3)
if end is None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    open(f"{folder}/waits", "w").close()
    time.sleep(60)
if end < 0:
    os.kill(os.getpid(), -end)
sys.exit(end)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(restarts, "PROGRAM", (str(tmp_path / "program.py"),))
    monkeypatch.setattr(restarts, "LOOK_S", 0.01)
    return tmp_path


def run(folder: Path, ends: list[object], steps: list[list[int]], most: int, *arguments: str) -> int:
    (folder / "ends").write_text(json.dumps(ends))
    (folder / "steps").write_text(json.dumps(steps))
    return supervise([str(folder), *arguments], most)


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


def test_a_killed_run_is_started_again_until_it_is_done(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(program, [KILLED, SEGMENTATION, 0], [[1, 2], [3], []], 5, "--start-over") == 0
    # Records are put aside once.
    assert starts(program) == ["--start-over", "-", "-"]
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "posttrain: the run was killed by SIGKILL in step 3; restart 1 of at most 5",
        "posttrain: the run was killed by SIGSEGV in step 4; restart 2 of at most 5",
    ]
    record = [json.loads(line) for line in (program / restarts.RECORD).read_text().splitlines()]
    assert [(line["restart"], line["step"], line["reason"]) for line in record] == [
        (1, 3, "was killed by SIGKILL in step 3"),
        (2, 4, "was killed by SIGSEGV in step 4"),
    ]


def test_the_same_error_in_the_same_step_ends_it(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ends: list[object] = ["RunStopped: worker 3 died at 12:01", "RunStopped: worker 7 died at 12:09"]
    assert run(program, ends, [[1, 2], []], 5) == 3
    assert capfd.readouterr().err.splitlines()[-1] == (
        "posttrain: the run ended with exit code 3 in step 3 (RunStopped: worker 7 died at 12:09), and is not started again: it "
        "met the same error in step 3 again"
    )


def test_no_more_restarts_than_allowed(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(program, [KILLED, KILLED], [[1], [2]], 1) == 3
    assert capfd.readouterr().err.endswith("it was started again 1 time, as many as --restarts allows\n")
    assert len(starts(program)) == 2


@pytest.mark.parametrize("code", [0, 2, 75, 130])
def test_what_is_done_wrong_or_stopped_is_not_started_again(program: Path, code: int) -> None:
    assert run(program, [code], [[]], 5) == code
    assert len(starts(program)) == 1


def test_a_folder_that_a_dying_process_still_holds_is_tried_again(program: Path) -> None:
    # At the first start another run holds it: a wrong request.
    assert run(program, [KILLED, "InUse: another run is training", 0], [[1], [], []], 5) == 0


def test_a_lock_at_the_first_start_is_a_wrong_request(program: Path) -> None:
    assert run(program, ["InUse: another run is training"], [[]], 5) == 2


def test_a_standby_takes_over(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "STANDBY_AFTER_S", 0.0)
    (program / "program.py").write_text(PROGRAM.replace("if end < 0:", "if end < 0:\n    time.sleep(0.5)"))
    assert run(program, [KILLED, 0], [[1], []], 5) == 0
    assert starts(program) == ["-", "--standby"]


# The same with the real standby, which forks its runs: FOLDER/processes has the ids of each run and its parent.
FORKING = PROGRAM.replace(
    'if "--standby" in sys.argv and not channel.recv(3):\n    sys.exit(0)',
    """from posttrain.cli.supervised import Supervised
run = Supervised(os.dup(descriptor), waits="--standby" in sys.argv)
with run.preparing():
    run.accelerated = os.path.exists(f"{folder}/accelerated")
print(os.getpid(), os.getppid(), os.getsid(0), file=open(f"{folder}/processes", "a"))""",
).replace("if end < 0:", "if end < 0:\n    time.sleep(0.3)")


def processes(folder: Path) -> list[list[int]]:
    return [[int(number) for number in line.split()] for line in (folder / "processes").read_text().splitlines()]


def test_a_standby_forks_one_run_after_the_other(
    program: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restarts, "STANDBY_AFTER_S", 0.0)
    (program / "program.py").write_text(FORKING)
    ends: list[object] = [KILLED, KILLED, "ValueError: no", SEGMENTATION, 7]
    assert run(program, ends, [[1], [2], [3], [4], []], 4) == 7
    assert starts(program) == ["-", *["--standby"] * 4]
    first, *forked = processes(program)
    assert first[1] == os.getpid()
    assert len({pid for pid, _, _ in forked}) == 4
    assert len({parent for _, parent, _ in forked}) == 1 and forked[0][1] != os.getpid()
    # Each leads a session, as a run that was started does
    assert all(pid == session for pid, _, session in [first, *forked])
    said = [line for line in capfd.readouterr().err.splitlines() if "restart " in line]
    assert [line.partition("run ")[2].partition(";")[0] for line in said] == [
        "was killed by SIGKILL in step 2",
        "was killed by SIGKILL in step 3",
        "ended with exit code 3 in step 4 (ValueError: no)",
        "was killed by SIGSEGV in step 5",
    ]
    for pid, parent, _ in processes(program):
        assert not Path(f"/proc/{pid}").exists() and (parent == os.getpid() or not Path(f"/proc/{parent}").exists())


def test_a_standby_with_an_accelerator_becomes_the_run(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "STANDBY_AFTER_S", 0.0)
    (program / "program.py").write_text(FORKING)
    (program / "accelerated").touch()
    assert run(program, [KILLED, KILLED, 0], [[1], [2], []], 4) == 0
    assert starts(program) == ["-", "--standby", "--standby"]
    assert [parent for _, parent, _ in processes(program)] == [os.getpid()] * 3


def test_a_standby_that_is_killed_ends_its_run(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "STANDBY_AFTER_S", 0.0)
    # The second run kills its parent, and gets SIGTERM because of that
    kill_parent = "if number == 1:\n    os.kill(os.getppid(), signal.SIGKILL)\n    time.sleep(60)\nif end is None:"
    (program / "program.py").write_text(FORKING.replace("if end is None:", kill_parent))
    assert run(program, [KILLED, 5, 0], [[1], [2], []], 4) == 0
    record = [json.loads(line) for line in (program / restarts.RECORD).read_text().splitlines()]
    assert record[1]["reason"] == "was killed by SIGKILL in step 3"


@pytest.mark.slow
def test_what_a_standby_imports_starts_no_thread() -> None:
    code = "import os, posttrain.build.train; print(len(os.listdir('/proc/self/task')))"
    environment = restarts.STANDBY_ENVIRONMENT | os.environ
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "1\n"


def test_a_signal_is_handed_on_and_ends_it(program: Path) -> None:
    (program / "ends").write_text("[null]")
    (program / "steps").write_text("[[1]]")
    code = (
        "import sys; from posttrain.cli import restarts; restarts.PROGRAM = (sys.argv[1],); "
        "sys.exit(restarts.supervise([sys.argv[2]], 5))"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code, str(program / "program.py"), str(program)])
    while not (program / "waits").exists():
        assert supervisor.poll() is None
        time.sleep(0.02)
    os.kill(supervisor.pid, signal.SIGTERM)
    assert supervisor.wait(30) == 75
    assert len(starts(program)) == 1


def test_the_decision_by_hand() -> None:
    error = Ending(code=3, step=5, error="RunStopped: at 0x7f01 after 3 s")
    assert no_restart([error], 3) is None
    # The numbers differ, the error does not; a kill in between changes nothing
    again = Ending(code=3, step=5, error="RunStopped: at 0x8a11 after 4 s")
    killed = Ending(code=KILLED, step=5)
    assert no_restart([error, again], 3) == no_restart([error, killed, again], 3) != ""
    assert no_restart([error, Ending(code=3, step=6, error=again.error)], 3) is None
    assert no_restart([error, Ending(code=3, step=5, error="RunStopped: another")], 3) is None
    # Kills say nothing about the run; crashes of its own do
    assert no_restart([killed, killed], 3) is None
    crash = Ending(code=SEGMENTATION, step=5)
    assert no_restart([crash, crash], 3) == "it met the same error in step 5 again"


def test_pauses_grow_without_progress() -> None:
    def at(*steps: int) -> list[Ending]:
        return [Ending(code=KILLED, step=step) for step in steps]

    assert pause_s(at(4)) == 0  # the first restart at once
    assert pause_s(at(4, 5)) == 0  # progress
    assert [pause_s(at(*[4] * count)) for count in (2, 3, 4, 9)] == [1, 2, 4, 60]
    assert pause_s(at(1, 4, 4)) == 1


def test_the_option_is_not_handed_on() -> None:
    given = ["train", "run.yaml", "--restarts", "3", "a=1"]
    assert without_restarts(given) == ["train", "run.yaml", "a=1"]
    assert without_restarts(["train", "--restarts=3", "run.yaml"]) == ["train", "run.yaml"]
