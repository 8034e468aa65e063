"""Supervised fine-tuning on several devices has the numbers of a run in one process: losses, gradient norms, weights.

float32: to 1e-5 of a number's size, or 1e-6.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from posttrain.build.sft import sft_run
from posttrain.config import SftConfig
from warm.processes import WarmProcess

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

Changes = dict[str, dict[str, Any]]
TWO: Changes = {"policy": {"engine": "fsdp"}, "placement": {"devices": 2}}
SEQUENCES = TWO | {"policy": {"engine": "fsdp", "sequence_parallel": 2}}
# What is different from a run in one process, by name: changes of sections.
WAYS: dict[str, Changes] = {
    "one worker": {},
    "two ranks": TWO,
    "two nodes, whose pairs share sequences and keep weights in parts on the CPU": {
        "policy": {
            "engine": "fsdp",
            "sequence_parallel": 2,
            "engine_options": {"fsdp_size": 2, "cpu_offload": True},
        },
        "placement": {"devices": 4, "nodes": 2},
    },
    "two ranks share matrices": {
        "policy": {"engine": "megatron", "tensor_parallel": 2},
        "placement": {"devices": 2},
    },
    "two ranks share layers": {
        "policy": {"engine": "megatron", "pipeline_parallel": 2},
        "placement": {"devices": 2},
    },
}


def config(folder: Path, model: Path, name: str, changes: Changes, *, steps: int | None = None) -> SftConfig:
    """Two epochs of two steps, validated and saved after each, exported at the end."""
    rows = []
    for number in range(8):
        asked = {"role": "user", "content": f"say {number} " + "please " * (number % 3)}
        rows.append({"messages": [asked, {"role": "assistant", "content": f"{number}!" * (number + 1)}]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    sections: Changes = {
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "validation_files": [str(folder / "held_out.jsonl")],
            "sequences_per_step": 4,
        },
        "run": {"folder": str(folder / name), "total_epochs": 2, "total_steps": steps},
        "policy": {
            "optimizer": {"lr": 1e-3},
            "sequences_per_micro_batch_per_device": 3,  # two micro-batches in one process, one or two elsewhere
            "schedule_over": "epochs",
        },
        "validation": {"every_steps": 1},
        "checkpoint": {"every_steps": 1, "export_every_steps": 4},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    return SftConfig.model_validate({name: values | changes.get(name, {}) for name, values in sections.items()})


def on(address: str, changes: Changes) -> Changes:
    return changes | {
        "placement": {"device": "cpu", "cpu_threads": 1, "runtime": "ray", "ray_address": address}
        | changes.get("placement", {})
    }


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/"))} for line in lines]


def assert_same(found: Path, expected: Path) -> None:
    for here, there in zip(metrics_of(found), metrics_of(expected), strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            assert math.isclose(here[name], value, rel_tol=1e-5, abs_tol=1e-6), f"{name}: {here[name]}, not {value}"
    saved = "checkpoints/global_step_4/policy"
    for file in (
        f"{saved}/model.safetensors",
        f"{saved}/optimizer.safetensors",
        "exports/global_step_4/policy/model.safetensors",
    ):
        mine, theirs = load_file(found / file), load_file(expected / file)
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(
                mine[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = sft_run(config(tmp_path_factory.mktemp("alone"), tiny_llama, "run", {}))
    assert len(metrics_of(folder)) == 5  # the starting weights, and four steps
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_of_a_run_in_one_process(
    way: str, address: str, in_process: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    changes = on(address, WAYS[way])
    folder = sft_run(config(tmp_path, tiny_llama, "run", changes))
    assert_same(folder, in_process)
    workers = json.loads((folder / "workers" / "workers.json").read_text())
    assert len(workers) == changes["placement"].get("devices", 1)


def test_a_run_goes_on_with_another_number_of_ranks(
    address: str, in_process: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    """A step in one process, one on two ranks, one on two that share sequences, and the last one in one process again."""
    sides = [{}, on(address, TWO), on(address, SEQUENCES), {}]
    for steps, changes in enumerate(sides, start=1):
        folder = sft_run(config(tmp_path, tiny_llama, "run", changes, steps=steps), allow_config_change=True)
    assert len(json.loads((folder / "run.json").read_text())["resumes"]) == 3
    assert_same(folder, in_process)


def test_a_lost_worker_is_named_and_the_run_goes_on_when_started_again(
    address: str, tmp_path: Path, tiny_llama: Path
) -> None:
    changes = on(address, TWO)
    changes |= {"run": {"folder": str(tmp_path / "run"), "total_epochs": 2000}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path, tiny_llama, "run", changes).model_dump(mode="json")))
    command = [sys.executable, "-m", "posttrain", "sft", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    process = WarmProcess(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until = time.monotonic() + 120
        saved = tmp_path / "run" / "checkpoints" / "global_step_2"
        while not saved.is_dir():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        workers = json.loads((tmp_path / "run" / "workers" / "workers.json").read_text())
        os.kill(workers["trainer rank 1"]["pid"], signal.SIGKILL)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 3, said
    assert f"trainer rank 1 (process {workers['trainer rank 1']['pid']} on" in said and "has died" in said
    assert "Last good checkpoint: global_step_" in said
    last = max(int(each.name.rpartition("_")[2]) for each in saved.parent.glob("global_step_*[0-9]"))
    run = {"folder": str(tmp_path / "run"), "total_epochs": 2000, "total_steps": last + 1}
    again = sft_run(config(tmp_path, tiny_llama, "run", {"run": run}), allow_config_change=True)
    assert [line["step"] for line in metrics_of(again)] == list(range(last + 2))
