"""What the Ray runtime is made of, without Ray: plain records, processes, groups of workers, waits with an owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import scored_batch, sequence_batch
from posttrain.backends.runtime.ray import processes
from posttrain.backends.runtime.ray.processes import WorkerProcess, read_log, state, tail, telling_lines
from posttrain.backends.runtime.ray.wire import PlainRecord, from_plain, to_plain
from posttrain.backends.runtime.ray.worker import Failure
from posttrain.errors import ConfigError, Problem, RunStopped
from posttrain.processes.proc import descendants, started
from posttrain.records.batches import ScoredBatch
from posttrain.records.plans import LossPlan

pytest.importorskip("ray")


def batch() -> ScoredBatch:
    sequences = sequence_batch(
        tokens=torch.arange(8).view(2, 4),
        prompt_lengths=torch.tensor([1, 2]),
        response_mask=torch.tensor([[True, False], [True, True]]),
        rollout_logprobs=torch.tensor([[-0.5, 0.0], [-1.0, -2.0]]),
        group_index=torch.tensor([0, 0]),
        sample_ids=("a/0", "a/1"),
    )
    return scored_batch(sequences, reward_terms={"math": torch.tensor([1.0, float("nan")])})


class TestWire:
    def test_a_batch_comes_back_as_it_was(self) -> None:
        plain = to_plain(batch())
        assert isinstance(plain, PlainRecord) and type(plain.values["rewards"]).__name__ == "ndarray"
        assert type(plain.values["sequences"].values["tokens"]).__name__ == "ndarray"
        back = from_plain(plain)
        sequences = back.sequences
        assert torch.equal(sequences.tokens, batch().sequences.tokens) and sequences.response_mask.dtype == torch.bool
        assert sequences.sample_ids == ("a/0", "a/1") and back.turn_rewards is None
        torch.testing.assert_close(back.reward_terms, batch().reward_terms, equal_nan=True)

    def test_what_arrives_can_be_written_to(self) -> None:
        array = to_plain(torch.zeros(2))
        array.flags.writeable = False  # as Ray hands it out
        from_plain(array).add_(1.0)
        assert array.sum() == 0.0

    def test_a_record_without_tensors_stays_itself(self) -> None:
        plan = LossPlan(name="ppo_clip", aggregation="token_mean", temperature=1.0)
        assert to_plain(plan) is plan and from_plain((plan, [1, "a"])) == (plan, [1, "a"])


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def process_of(pid: int, log: Path) -> WorkerProcess:
    begun = started(pid)
    assert begun is not None
    return WorkerProcess(pid=pid, started=begun, node="n", host="h", log=str(log))


class TestProcesses:
    def test_running_stopped_and_gone(self, sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
        known = process_of(sleeper.pid, tmp_path / "log")
        assert state(known) == "running"
        os.kill(sleeper.pid, signal.SIGSTOP)
        until = time.monotonic() + 5
        while state(known) != "stopped":
            assert time.monotonic() < until
        (tmp_path / "log").write_text("x")
        processes.end(known)  # SIGKILL also reaches what is stopped
        sleeper.wait(5)
        assert state(known) == "gone" and not (tmp_path / "log").exists()

    def test_a_number_used_again_is_another_process(self, sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
        other = WorkerProcess(pid=sleeper.pid, started=1, node="n", host="h", log=str(tmp_path / "log"))
        assert state(other) == "gone"
        processes.end(other)
        assert sleeper.poll() is None

    def test_a_log_is_read_by_whole_lines(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_bytes(b"one\ntwo\nthr")
        assert read_log(str(log), 0) == (["one", "two"], 8)
        with log.open("ab") as file:
            file.write(b"ee\n")
        assert read_log(str(log), 8) == (["three"], 14)
        assert telling_lines(tail(str(log)), 2) == ["two", "three"]
        assert read_log(str(tmp_path / "none"), 5) == ([], 5) and tail(str(tmp_path / "none")) == ""

    def test_the_last_lines_of_a_crash_begin_where_its_report_does(self, tmp_path: Path) -> None:
        """A report ends with threads that wait and with the extension modules, which explain nothing."""
        program = "import faulthandler, ctypes; faulthandler.enable()\ndef reads():\n    ctypes.string_at(0)\nreads()"
        log = tmp_path / "log"
        with log.open("wb") as file:
            file.write(b"step 1\nstep 2\nstep 3\nthe library's own words\n")
            file.flush()
            subprocess.run([sys.executable, "-c", program], stderr=file, check=False)
            file.write(b"Extension modules: many\n" * 20)
        lines = telling_lines(tail(str(log)), 2)
        assert lines[2:4] == ["the library's own words", "Fatal Python error: Segmentation fault"]
        assert any("in reads" in line for line in lines) and len(lines) <= 19


class TestFailure:
    def test_a_foreseen_error_comes_back_as_itself(self) -> None:
        problem = Problem("no weights", field="model.path")
        error = Failure(kind="ModelError", text="", problems=(problem,)).error("trainer rank 0")
        assert type(error).__name__ == "ModelError" and error.problems == [problem]  # type: ignore[attr-defined]
        assert isinstance(Failure(kind="RunStopped", text="out of memory").error("x"), RunStopped)

    def test_any_other_keeps_its_traceback(self) -> None:
        error = Failure(kind="", text="Traceback: boom").error("trainer rank 1")
        assert isinstance(error, RuntimeError) and "trainer rank 1 failed:\nTraceback: boom" in str(error)


class Promise:
    """A value that comes, or an error."""

    def __init__(self, value: Any = None, after_s: float = 0.0):
        self.value = value
        self.at = time.monotonic() + after_s


class FakeCluster:
    """Workers that are values; ``dead`` ones break their promises."""

    node = "here"

    def __init__(self) -> None:
        self.states: dict[str, str] = {}

    def call(self, handle: Any, method: str, *arguments: Any) -> Promise:
        from posttrain.backends.runtime.ray.worker import FinishedGroups, News, PackedGroups

        silent = self.states.get(handle) in ("stopped", "busy")
        none = PackedGroups.of(FinishedGroups.of([]))
        return Promise(News(lines=[], tokens=0, sequences=0, groups=none, notices=[]), 1e6 if silent else 0.0)

    def call_for_two(self, handle: Any, method: str, *arguments: Any) -> tuple[Promise, Promise]:
        return self.call(handle, method, *arguments), Promise(())

    def ready(self, promises: list[Promise], timeout_s: float, *, whole: bool = False) -> list[Promise]:
        until = time.monotonic() + timeout_s
        while True:
            done = [each for each in promises if each.at <= time.monotonic()]
            if len(done) >= (len(promises) if whole else 1) or time.monotonic() >= until:
                return done
            time.sleep(0.01)

    def value(self, promise: Promise, timeout_s: float) -> Any:
        if isinstance(promise.value, Exception):
            raise promise.value
        return promise.value

    def on_node(self, node: str, function: Any, *arguments: Any) -> Any:
        if function is processes.state:
            return {"stopped": "stopped"}.get(self.states.get(arguments[0].host, ""), "running")
        return "the last thing it said\n" if function is tail else None

    def kill(self, handle: Any) -> None:
        pass


class TestWatch:
    @pytest.fixture
    def watch(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
        from posttrain.backends.runtime.ray import watch as module
        from posttrain.records.notices import Notices

        for name, value in (("ROUND_S", 0.02), ("SILENCE_S", 0.1), ("SETTLE_S", 0.3)):
            monkeypatch.setattr(module, name, value)
        said: list[str] = []
        watch = module.Watch(FakeCluster(), Notices(), tmp_path / "logs", said.append)  # type: ignore[arg-type]
        for rank in range(2):
            process = WorkerProcess(pid=rank, started=0, node="here", host=f"w{rank}", log="")
            watch.add(module.Member(name=f"trainer rank {rank}", handle=f"w{rank}", process=process))
        watch.start()
        yield watch
        watch.close()

    def test_results_by_worker(self, watch: Any) -> None:
        first, second = watch.members
        assert watch.wait({first: Promise(1), second: Promise(2, 0.05)}, "x", 5.0) == {first: 1, second: 2}

    def test_many_workers_are_polled_less_often(self, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """32 polls a second: 16 workers every half second, 64 every two seconds, 1,024 every 32."""
        monkeypatch.setattr("posttrain.backends.runtime.ray.watch.ROUND_S", 0.5)
        few, pauses = watch.members, []
        for count in (2, 16, 64, 1024):
            watch.members = few[:1] * count
            pauses.append(watch._pause_s())
        watch.members = few
        assert pauses == [0.5, 0.5, 2.0, 32.0]

    def test_a_deadline_names_who_is_late(self, watch: Any) -> None:
        first, second = watch.members
        with pytest.raises(RunStopped, match=r"saving: no answer of trainer rank 1 within 0\.2 s"):
            watch.wait({first: Promise(1), second: Promise(2, 60)}, "saving", 0.2)

    def test_a_deadline_counts_from_the_last_part_that_ended(self, watch: Any) -> None:
        """Parts end in each of the first looks; the result comes after the deadline of one part."""
        first, _ = watch.members
        ended = iter([True] * 8)
        slow = Promise("done", 0.6)
        assert watch.wait({first: slow}, "policy update", 0.3, moved=lambda: next(ended, False)) == {first: "done"}
        with pytest.raises(RunStopped, match=r"policy update: no answer of trainer rank 0 within 0\.3 s"):
            watch.wait({first: Promise("done", 1e6)}, "policy update", 0.3, moved=lambda: False)

    def test_a_stopped_worker_is_named_with_its_last_words(self, watch: Any, tmp_path: Path) -> None:
        first, second = watch.members
        threading.Timer(0.1, watch.cluster.states.__setitem__, ("w1", "stopped")).start()
        with pytest.raises(
            RunStopped, match=r"trainer rank 1 \(process 1 on w1\) is stopped.*\n  the last thing it said"
        ):
            watch.wait({first: Promise(1, 60), second: Promise(2, 60)}, "x", 30.0)
        assert (tmp_path / "logs/trainer_rank_1.end.log").read_text() == "the last thing it said\n"

    def test_a_busy_worker_is_left_to_its_work(self, watch: Any) -> None:
        first, _ = watch.members
        watch.cluster.states["w0"] = "busy"  # answers nothing, and its process runs
        assert watch.wait({first: Promise("done", 0.5)}, "x", 30.0) == {first: "done"}

    def test_who_lost_a_neighbour_is_not_named(self, watch: Any) -> None:
        from posttrain.backends.runtime.ray.cluster import WorkerDied

        first, second = watch.members
        failed = Promise(Failure(kind="", text="connection closed by peer"))
        with pytest.raises(RunStopped, match=r"trainer rank 1 .* has died"):
            watch.wait({first: failed, second: Promise(WorkerDied("x"), 0.1)}, "x", 30.0)

    def test_a_foreseen_error_is_raised_as_it_is(self, watch: Any) -> None:
        first, second = watch.members
        failed = Promise(Failure(kind="ConfigError", text="", problems=(Problem("too large"),)))
        with pytest.raises(ConfigError, match="too large"):
            watch.wait({first: failed, second: Promise(2, 60)}, "x", 30.0)

    def test_an_error_that_nobody_foresaw_is_raised_when_no_neighbour_is_lost(self, watch: Any) -> None:
        first, second = watch.members
        with pytest.raises(RuntimeError, match="trainer rank 0 failed:\nboom"):
            watch.wait({first: Promise(Failure(kind="", text="boom")), second: Promise(2)}, "x", 30.0)


def test_workers_of_a_plan() -> None:
    """Policy and sampler on devices 0 and 1, critic on 2, and a sampler on 3: who shares a worker."""
    from posttrain.backends.runtime.ray.role_groups import groups_of
    from posttrain.config import RunConfig
    from posttrain.plan.roles import place

    sections: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train_files": ["x"]},
        "advantage": {"name": "gae"},
        "loss": {"kl_coef": 0.1},
        "policy": {"engine": "fsdp", "devices": [0, 1]},
        "reference": {"devices": [0, 1]},
        "critic": {"devices": [2]},
        "rollout": {"devices": [0, 1]},
        "placement": {"devices": 4},
    }

    def groups() -> list[tuple[str, tuple[str, ...], int, bool]]:
        plan, problems = place(RunConfig.model_validate(sections))
        assert plan is not None, problems
        return [(group.name, group.roles, len(group.ranks), group.together) for group in groups_of(plan)]

    assert groups() == [("trainer", ("rollout", "policy", "reference"), 2, True), ("critic", ("critic",), 1, True)]
    sections["rollout"] = {"devices": [3]}
    assert groups() == [
        ("trainer", ("policy", "reference"), 2, True),
        ("critic", ("critic",), 1, True),
        ("rollout", ("rollout",), 1, False),
    ]
    sections["rollout"] = {"devices": [0, 1, 2, 3], "engine": "vllm", "tensor_parallel": 2}
    assert groups()[-1] == ("rollout", ("rollout",), 4, False)
    plan, _ = place(RunConfig.model_validate(sections))
    assert plan is not None
    servers = groups_of(plan)[-1]  # two copies of two devices: the first of each has a worker that is told what to do
    assert [servers.worker(rank) for rank in servers.leading] == ["rollout rank 0", "rollout rank 2"]
    sections["rollout"] = {"engine": "vllm", "endpoints": ["http://h:1"]}
    assert [name for name, *_ in groups()] == ["trainer", "critic"]


@pytest.mark.slow
class TestServerBesideAWorker:
    """A worker ends with its server, so that it is found lost and replaced."""

    CODE = (
        "import sys, time; from posttrain.backends.serving.launch import LaunchedServer\n"
        "from posttrain.backends.runtime.ray.serving import Server\n"
        "server = LaunchedServer([sys.executable, '-c', 'import time; print(\\'a last word\\', flush=True); time.sleep(60)'],"
        " port=1, name='the server', environment={})\n"
        "Server(server); print(server.process.pid, flush=True); time.sleep(60)"
    )

    @pytest.mark.parametrize(
        ("how", "why"), [(signal.SIGKILL, "has ended with code"), (signal.SIGSTOP, "is stopped (process ")]
    )
    def test_it_is_named_with_the_end_of_its_log(self, how: signal.Signals, why: str, tmp_path: Path) -> None:
        command = [sys.executable, "-c", self.CODE]
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as worker:
            assert worker.stdout is not None
            keeper = int(worker.stdout.readline())
            until = time.monotonic() + 20
            while not any("a last word" in log.read_text() for log in tmp_path.glob("*/log.txt")):
                assert time.monotonic() < until
                time.sleep(0.02)
            (child,) = descendants(keeper)
            os.kill(child, how)
            _, said = worker.communicate(timeout=30)
        assert worker.returncode == 1 and f"the server {why}" in said and "a last word" in said
        until = time.monotonic() + 20
        while list(tmp_path.iterdir()):  # its keeper tidies up
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_signal_while_ray_starts_is_heard_by_our_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """ray.init puts a handler of SIGTERM of its own in place, which ends the process with exit code 15."""
    heard: list[int] = []

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    from posttrain.backends.runtime.ray import cluster

    monkeypatch.setattr(cluster.ray, "init", init)
    try:
        with pytest.raises(SystemExit):
            cluster.Cluster(None, workers=1, object_store_bytes=1, start_timeout_s=60.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize("kind", ["ObjectStoreFullError", "OutOfDiskError"])
def test_an_object_store_without_room_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from posttrain.backends.runtime.ray import cluster

    def full(value: object) -> object:
        raise getattr(cluster, kind)("the object of 419 MB does not fit")

    monkeypatch.setattr(cluster.ray, "put", full)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"object_store_memory": 256.0 * 2**20})
    with pytest.raises(RunStopped, match=r"^Ray's object store \(256 MiB in the whole cluster\) has no room") as caught:
        cluster.Cluster.put(object.__new__(cluster.Cluster), [1])
    assert "Make room in /dev/shm" in str(caught.value) and "\n" not in str(caught.value)


def test_a_part_of_a_batch_that_died_with_its_process_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import ObjectLostError

    from posttrain.backends.runtime.ray.cluster import RayArray

    def get(promise: object) -> None:
        raise ObjectLostError("ab", None, "the owner\nand its stack")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(RunStopped, match=r"^a part of the batch is lost: ") as found:
        RayArray("a promise").read()
    assert "\n" not in str(found.value)


def test_a_worker_that_ray_kills_for_memory_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reports it by another error than that of any other death."""
    import ray
    from ray.exceptions import OutOfMemoryError

    from posttrain.backends.runtime.ray.cluster import Cluster, WorkerDied

    def get(promise: object, timeout: float) -> None:
        raise OutOfMemoryError("1 worker(s) were killed due to the node running low on memory")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(WorkerDied, match="running low on memory") as found:
        Cluster.__new__(Cluster).value("a promise", 1.0)
    assert found.value.why == "was killed by Ray: its machine ran low on memory (RAY_memory_usage_threshold)"


def test_a_ray_that_is_not_up_in_time_is_an_error_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with much other work Ray raises Exception itself; other programs' errors, such as a wrong argument, pass."""
    import ray

    from posttrain.backends.runtime.ray.cluster import Cluster

    def fails(error: Exception) -> None:
        def init(**_: Any) -> None:
            raise error

        monkeypatch.setattr(ray, "init", init)
        Cluster(None, workers=1, object_store_bytes=100_000_000, start_timeout_s=60.0)

    with pytest.raises(RunStopped, match="Ray does not start: The current node timed out"):
        fails(Exception("The current node timed out during startup."))
    with pytest.raises(TypeError):
        fails(TypeError("no such argument"))


def test_ray_has_as_long_to_start_as_the_run_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray gives up after limits of its own, one of them a number in its code, whatever the run's is."""
    import ray
    from ray._private import services

    from posttrain.backends.runtime.ray import cluster, own_folder

    looks: list[float] = []
    seen: dict[str, Any] = {}

    def get_node(address: str, node: str) -> dict[str, str]:
        looks.append(time.monotonic())
        if len(looks) < 3:
            raise RuntimeError("no such node")
        return {"node": node}

    def init(**given: Any) -> None:
        seen.update(given["_system_config"], head=os.environ[cluster.HEAD_START])
        seen["node"] = services.get_node("an address", "a node")  # as ray._private.node looks for it

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(own_folder, "_short_parent", lambda: str(tmp_path))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("", (), {"get_node_id": lambda self: "n"})())
    monkeypatch.delenv(cluster.HEAD_START, raising=False)
    cluster.Cluster(None, workers=1, object_store_bytes=1, start_timeout_s=200.5).close()
    assert seen["node"] == {"node": "a node"} and len(looks) == 3
    assert seen["head"] == "201" and cluster.HEAD_START not in os.environ and services.get_node is get_node
    assert seen["worker_register_timeout_seconds"] == 201 and seen["agent_register_timeout_ms"] == 201_000
    looks.clear()
    with pytest.raises(
        RunStopped, match=r"Ray does not start: its node was not up within 0.1 s \(placement.start_timeout_s\)"
    ):
        cluster.Cluster(None, workers=1, object_store_bytes=1, start_timeout_s=0.1)
    assert seen["head"] == "30" and seen["worker_register_timeout_seconds"] == 60  # never less than Ray's own
    assert len(looks) < 3
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_driver_that_was_killed_goes_when_the_next_cluster_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.backends.runtime.ray import own_folder

    monkeypatch.setattr(own_folder, "_short_parent", lambda: str(tmp_path))
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from posttrain.backends.runtime.ray import own_folder\n"
        "own_folder._short_parent = lambda: sys.argv[1]\n"
        "folder = Path(own_folder.new_folder(), 'session_1/logs')\n"
        "folder.mkdir(parents=True)\n"
        "(folder / 'gcs_server.out').write_text('x')\n"
        "(folder.parent.parent / 'session_latest').symlink_to('session_1')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (killed,) = tmp_path.iterdir()
    foreign, older = tmp_path / "pt-ray-foreign", tmp_path / "pt-ray-older"
    foreign.mkdir()
    older.mkdir()  # says nothing of its driver
    elsewhere = json.loads((killed / own_folder.DRIVER).read_text()) | {"host": "another machine"}
    (foreign / own_folder.DRIVER).write_text(json.dumps(elsewhere))
    mine = Path(own_folder.new_folder())
    again = Path(own_folder.new_folder())
    assert {*tmp_path.iterdir()} == {foreign, older, mine, again}
    own_folder.remove(str(mine))
    assert not mine.exists()


def test_a_folder_that_another_run_removes_first_stops_no_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from posttrain.backends.runtime.ray import own_folder

    monkeypatch.setattr(own_folder, "_short_parent", lambda: str(tmp_path))
    left = tmp_path / f"{own_folder.PREFIX}left"
    left.mkdir()
    gone = {"pid": 2**22 + 1, "started": 1, **own_folder._namespace()}
    (left / own_folder.DRIVER).write_text(json.dumps(gone))
    (left / "session").mkdir()
    monkeypatch.setattr(own_folder.shutil, "rmtree", lambda *_, **__: left.rename(tmp_path / "elsewhere"))
    assert Path(own_folder.new_folder()).parent == tmp_path


def test_a_process_that_is_connected_to_ray_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook may have called ray.init() itself: it is told so, and what it runs there is not ended."""
    import ray

    from posttrain.backends.runtime.ray.cluster import Cluster

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("the connection was closed"))
    for address in (None, "192.0.2.7:6379"):
        with pytest.raises(RunStopped, match=r"connected to Ray already.*call ray.shutdown\(\) first"):
            Cluster(address, workers=1, object_store_bytes=100_000_000, start_timeout_s=60.0)
