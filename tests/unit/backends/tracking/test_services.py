"""Each service with its real library, offline: what is read back through that library equals metrics.jsonl, and a run that is
sent in two parts, the second after a kill, is one curve."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.errors import RequestError
from posttrain.registry import TRACKERS
from posttrain.run.relay import push
from warm.processes import run

Curves = dict[str, dict[int, float]]  # metric -> step -> value

RUN_ID = "0123456789abcdef0123456789abcdef"


def metrics_at(step: int) -> dict[str, float | None]:
    """A step with the kinds of names there are, a number that needs all of its digits, and one that was not finite."""
    return {
        "reward/mean": step / 3,
        "validation/sums & products/reward_best@4": 0.25 + step,
        "step/sequences": 8,
        "time/step_s": 0.5 + step / 7,
        "policy/loss": None if step == 2 else -1e-9 * step,
    }


def write_run(folder: Path, steps: Iterable[int], *, trackers: str = "[]", **tracking: Any) -> Path:
    """A run folder as a run leaves it, with a validation at step 0 and 2."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in tracking.items())
    (folder / "config.yaml").write_text(
        f"run:\n  name: first try\n  seed: 3\ntracking:\n  project: sums\n  trackers: {trackers}\n{settings}"
    )
    (folder / "run.json").write_text(json.dumps({"id": RUN_ID, "resumes": [], "status": "done"}))
    (folder / "metrics.jsonl").write_text("")
    for step in steps:
        append(folder, step)
    (folder / "validation").mkdir(exist_ok=True)
    for step in (0, 2):
        samples = [
            {
                "sample_id": f"v{number}",
                "data_source": "sums",
                "prompt": f"{number} + 1 =",
                "response": "<script>alert(1)</script>\n| a | b |",
                "ground_truth": {"target": number + 1},
                "reward": None if number == 2 else 1.0,
                "stop_reason": "stop",
                "response_tokens": 7,
            }
            for number in range(4)
        ]
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        (folder / f"validation/step_{step}.jsonl").write_text(text)
    return folder


def append(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **metrics_at(step)}) + "\n")


def curves_in(folder: Path) -> Curves:
    """metrics.jsonl, without the numbers that were not finite."""
    found: Curves = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        row.pop("nonfinite", None)
        _add(found, step, {name: value for name, value in row.items() if value is not None})
    return found


def _add(found: Curves, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        assert step not in found.setdefault(name, {}), f"{name} has two values at step {step}"
        found[name][step] = value


def in_tensorboard(folder: Path) -> tuple[Curves, dict[str, list[tuple[int, str]]]]:
    """Curves, and texts by tag with their steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found: Curves = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            _add(found, event.step, {name: event.value})
    texts = {
        name: [(event.step, make_ndarray(event.tensor_proto).item().decode()) for event in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }
    return found, texts


def in_wandb(folder: Path) -> tuple[Curves, dict[str, Any], list[dict[str, Any]]]:
    """Curves, configuration and tables from the offline files."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: Curves = {}
    config: dict[str, Any] = {}
    tables = []
    for path in (folder / "wandb").glob("offline-run-*/*.wandb"):
        for data in _log_records(path):
            record = Record.FromString(data)
            if record.HasField("run"):
                assert (record.run.run_id, record.run.project) == (id_of(folder), "sums")
                config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            if record.HasField("history"):
                items = {one.key or " ".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
                if place := items.get("validation/samples path"):
                    tables.append(json.loads((path.parent / "files" / place).read_text()))
                ours = {name: value for name, value in items.items() if name[0] != "_" and "samples " not in name}
                _add(found, items["_step"], ours)
    return found, config, tables


def _log_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file, which is LevelDB's log format after a header of 7 bytes: blocks of 32 KiB, in which
    each piece has 4 bytes of checksum, 2 of length and 1 that says whether it is whole (1), first, middle or last (4)."""
    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # too little room for the head of another piece
            place += 32768 - place % 32768
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def in_mlflow(folder: Path) -> tuple[Curves, Any, Path]:
    """Curves, MLflow's run, and the folder of its files."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.resolve()}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("sums")
    [run] = client.search_runs([experiment.experiment_id])
    found: Curves = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            _add(found, metric.step, {name: metric.value})
    return found, run, Path(run.info.artifact_uri.removeprefix("file://"))


def in_swanlab(folder: Path) -> tuple[Curves, list[str]]:
    """Curves and texts from the offline files."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: Curves = {}
    for path in (folder / "swanlab").glob("run-*/*.swanlab"):
        reader = DataStoreReader()
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = Record.FromString(data)
            if record.HasField("start"):
                assert (record.start.id, record.start.project) == (id_of(folder), "sums")
            if record.HasField("scalar"):
                _add(found, record.scalar.step, {record.scalar.key: record.scalar.value.number})
        reader.close()
    texts = [path.read_text() for path in sorted((folder / "swanlab").glob("run-*/media/text/*.txt"))]
    return found, texts


def send(name: str, folder: Path) -> int:
    return push(name, TRACKERS.get(name)(), folder)


def killed_and_resumed(folder: Path, name: str, **tracking: Any) -> tuple[int, int]:
    """Steps 0 to 4 are sent; the run dies, goes on after step 2 (its checkpoint), and ends at 6. Returns what was sent."""
    write_run(folder, range(5), **tracking)
    first = send(name, folder)
    before = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(before[:3]))
    (folder / "run.json").write_text(json.dumps({"id": RUN_ID, "resumes": [{"first_step": 3}], "status": "done"}))
    for step in range(3, 7):
        append(folder, step)
    return first, send(name, folder)


def id_of(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["id"])


def as_float32(curves: Curves) -> Curves:
    return {name: {step: float(np.float32(value)) for step, value in curve.items()} for name, curve in curves.items()}


def test_tensorboard_has_the_curves_and_drops_what_was_done_again(tmp_path: Path) -> None:
    assert killed_and_resumed(tmp_path, "tensorboard", validation_samples=2) == (5, 4)  # 3 and 4 twice: it can rewind
    curves, texts = in_tensorboard(tmp_path)
    assert curves == as_float32(curves_in(tmp_path))
    assert sorted(curves["reward/mean"]) == [0, 1, 2, 3, 4, 5, 6]
    [(step, config)] = texts["config/text_summary"]
    assert step == 0 and '"project": "sums"' in config
    assert [step for step, _ in texts["validation/samples/text_summary"]] == [0, 2]
    assert all(
        line.startswith("    ") for _, text in texts["validation/samples/text_summary"] for line in text.split("\n")
    )
    assert "<script>" in texts["validation/samples/text_summary"][0][1]  # literal, as four spaces make it


@pytest.mark.slow
def test_wandb_offline_has_the_curves_the_configuration_and_the_tables(tmp_path: Path) -> None:
    assert killed_and_resumed(tmp_path, "wandb", offline=True, validation_samples=3) == (5, 7)  # written anew
    curves, config, tables = in_wandb(tmp_path)
    assert curves == curves_in(tmp_path)
    assert config["run"] == {"name": "first try", "seed": 3}
    assert [len(table["data"]) for table in tables] == [3, 3]
    assert tables[0]["columns"][0] == "sample_id" and [row[0] for row in tables[0]["data"]] == ["v0", "v1", "v2"]
    assert tables[0]["data"][2][4:6] == ["{'target': 3}", None]  # ground truth as text; no valid reward


@pytest.mark.slow
def test_mlflow_has_the_curves_the_configuration_and_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.backends.tracking.mlflow import name_of

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert killed_and_resumed(tmp_path, "mlflow", validation_samples=2) == (5, 2)
    curves, run, files = in_mlflow(tmp_path)
    assert curves == {name_of(name): curve for name, curve in curves_in(tmp_path).items()}
    assert "validation/sums _ products/reward_best_at_4" in curves
    assert (run.data.params["run.seed"], run.info.status, run.info.run_name) == ("3", "FINISHED", "first try")
    assert (files / "config.yaml").read_text() == (tmp_path / "config.yaml").read_text()
    assert [sample["sample_id"] for sample in json.loads((files / "validation/step_2.json").read_text())] == [
        "v0",
        "v1",
    ]


@pytest.mark.slow
def test_swanlab_offline_has_the_curves_and_the_samples(tmp_path: Path) -> None:
    assert killed_and_resumed(tmp_path, "swanlab", offline=True, validation_samples=2) == (5, 7)
    curves, texts = in_swanlab(tmp_path)
    assert curves == curves_in(tmp_path)
    assert len(texts) == 4 and all("<script>" in text for text in texts)
    assert "seed: 3" in next((tmp_path / "swanlab").glob("run-*/files/config.yaml")).read_text()


KILLED = """
import os, signal, sys, time
from posttrain.cli.app import main
from posttrain.loops import rl_sync

measure, seen = rl_sync.measure, []

def counted(*args):
    seen.append(1)
    if len(seen) == 4:  # steps 1 to 3 are sent, and step 2 is the newest that is saved
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(*args)

if sys.argv.pop() == "kill":
    rl_sync.measure = counted
main()
"""


@pytest.mark.slow
def test_a_run_that_is_killed_and_goes_on_leaves_one_curve_in_every_service(tmp_path: Path, tiny_llama: Path) -> None:
    from posttrain.backends.tracking.mlflow import name_of

    rows = [
        {"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": str(2 * n)}} for n in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "run": {"folder": str(tmp_path / "run"), "total_steps": 5},
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {
            "train_files": [str(tmp_path / "train.jsonl")],
            "validation_files": [str(tmp_path / "train.jsonl")],
            "prompts_per_step": 2,
        },
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 6},
        "policy": {"sequences_per_mini_batch": 3, "sequences_per_micro_batch_per_device": 3},
        "validation": {"every_steps": 3, "max_prompts": 3},
        "checkpoint": {"every_steps": 2},
        "tracking": {
            "trackers": ["tensorboard", "wandb", "mlflow", "swanlab"],
            "project": "sums",
            "offline": True,
            "validation_samples": 2,
        },
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    (tmp_path / "main.py").write_text(KILLED)

    def train(how: str) -> int:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "WANDB"))}
        command = [sys.executable, str(tmp_path / "main.py"), "train", str(tmp_path / "run.yaml"), how]
        done = run(command, env=environment, capture_output=True, timeout=240, check=False)
        print(done.stderr.decode())
        return done.returncode

    assert [train("kill"), train("go on")] == [-signal.SIGKILL, 0]
    folder = tmp_path / "run"
    written = curves_in(folder)
    assert sorted(written["reward/mean"]) == [1, 2, 3, 4, 5]
    assert in_tensorboard(folder)[0] == as_float32(written)  # to the last time measured: step 3 is the one done again
    for curves in (in_wandb(folder)[0], in_swanlab(folder)[0], in_mlflow(folder)[0]):
        assert untimed(curves) == {name_of(name): curve for name, curve in untimed(written).items()}
        assert sorted(curves["time/step_s"]) == [0, 1, 2, 3, 4, 5]


def untimed(curves: Curves) -> Curves:
    """What a step that is done again repeats to the last bit."""
    return {name: curve for name, curve in curves.items() if not name.startswith(("time/", "speed/"))}


@pytest.mark.slow
def test_what_a_service_has_is_not_sent_again(tmp_path: Path) -> None:
    write_run(tmp_path, range(3))
    assert [send("mlflow", tmp_path), send("mlflow", tmp_path)] == [3, 0]
    (tmp_path / "trackers/mlflow.json").unlink()  # the service itself knows
    assert send("mlflow", tmp_path) == 0
    assert in_mlflow(tmp_path)[0]["reward/mean"] == curves_in(tmp_path)["reward/mean"]


@pytest.mark.slow
def test_wandb_without_a_key_says_so_and_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    write_run(tmp_path, range(1))
    with pytest.raises(RequestError, match="no API key of Weights & Biases is configured; type `wandb login`"):
        send("wandb", tmp_path)


@pytest.mark.slow
def test_mlflow_s_database_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while the tables are made leaves some of them, which MLflow cannot go on with."""
    from mlflow import MlflowClient

    write_run(tmp_path, range(3))
    search = MlflowClient.search_experiments

    def killed(self: MlflowClient, **options: Any) -> Any:
        search(self, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "search_experiments", killed)
        with pytest.raises(KeyboardInterrupt):
            send("mlflow", tmp_path)
    assert list((tmp_path / "mlflow").iterdir()) == []
    assert send("mlflow", tmp_path) == 3
