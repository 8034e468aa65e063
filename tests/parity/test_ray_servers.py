"""Samplers that are servers, started by workers of Ray or running already: a run has the numbers of one in a single process.

The server is a stand-in that speaks as vLLM's does; with POSTTRAIN_VLLM_PYTHON (a Python that has vLLM) a real one, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from ray_runs import assert_same, config, metrics_of
from test_async_runs import assert_each_group_is_trained_once, events

from posttrain.backends.serving.launch import free_port
from posttrain.build.generate import generate_run
from posttrain.build.train import train_run
from posttrain.config.generate import GenerateConfig
from warm.processes import warm_python

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

STAND_IN = Path(__file__).with_name("vllm_stand_in.py")
PYTHON = os.environ.get("POSTTRAIN_VLLM_PYTHON", "")
Sections = dict[str, dict[str, Any]]
TWO_AND_TWO: Sections = {
    "policy": {"engine": "fsdp", "devices": [0, 1]},
    "reference": {"devices": [0, 1]},
    "rollout": {"devices": [2, 3]},
    "placement": {"devices": 4},
}
# What is different from a run in one process: changes of sections, and copies of the sampler.
WAYS: dict[str, tuple[Sections, int]] = {
    "two ranks, two servers, through shared memory": (
        TWO_AND_TWO | {"rollout": {"devices": [2, 3], "weight_bucket_mib": 1}},
        2,
    ),
    "two ranks where two servers are, through a folder": (
        {"policy": {"engine": "fsdp"}, "rollout": {"weight_sync": "disk"}, "placement": {"devices": 2}},
        2,
    ),
    "two ranks of megatron, two servers, through shared memory": (
        TWO_AND_TWO | {"policy": {"engine": "megatron", "tensor_parallel": 2, "devices": [0, 1]}},
        2,
    ),
    "two ranks, two devices share a server, by broadcast": (
        TWO_AND_TWO | {"rollout": {"devices": [2, 3], "tensor_parallel": 2, "weight_sync": "collective"}},
        1,
    ),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where stand-ins say at their end what they were asked."""
    return tmp_path_factory.mktemp("told")


@pytest.fixture(scope="module")
def python(told: Path) -> str:
    """A program that passes for a Python with vLLM."""
    path = told / "python"
    path.write_text(f'#!/bin/sh\nexec {warm_python()} {STAND_IN} {told} "$@"\n')
    path.chmod(0o755)
    return str(path)


def served(changes: Sections, python: str) -> Sections:
    vllm = {"engine": "vllm", "engine_options": {"python": python}, "max_concurrent_sequences": 8}
    return changes | {"rollout": vllm | changes.get("rollout", {})}


def answers_of(told: Path) -> list[dict[str, Any]]:
    """What the stand-ins that have ended since were asked."""
    found = []
    for path in told.glob("*.json"):
        found.append(json.loads(path.read_text()))
        path.unlink()
    return found


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, python: str, told: Path) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    found = train_run(config(folder, tiny_llama, "run", served({}, python)))
    assert len(answers_of(told)) == 1
    return found


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_of_one_server(
    way: str, address: str, in_process: Path, tmp_path: Path, tiny_llama: Path, python: str, told: Path
) -> None:
    changes, copies = WAYS[way]
    changes = served(changes, python)
    changes["placement"] = changes["placement"] | {"runtime": "ray", "ray_address": address}
    assert_same(train_run(config(tmp_path, tiny_llama, "run", changes)), in_process)
    until = time.monotonic() + 30
    while len(list(told.glob("*.json"))) < copies and time.monotonic() < until:
        time.sleep(0.1)  # they end after their workers
    answers = answers_of(told)
    assert len(answers) == copies
    tensor = str(changes["rollout"].get("tensor_parallel", 1))
    for answer in answers:
        assert answer["words"][answer["words"].index("--tensor-parallel-size") + 1] == tensor
        # Every prompt of a step has its four samples from one server, and the work is shared: of 3 x 2 prompts an equal part.
        asked = [tuple(prompt) for prompt in answer["prompts"]]
        assert len(asked) == 24 // copies and all(asked.count(prompt) % 4 == 0 for prompt in asked)


@pytest.mark.parametrize("sync", ["auto", "disk"])
def test_a_server_on_two_nodes(
    sync: str, address: str, in_process: Path, tmp_path: Path, tiny_llama: Path, python: str, told: Path
) -> None:
    """One copy on devices 1 and 2 of two nodes with two each: the second node has workers of the server that answer nobody, and
    take every version of the weights."""
    changes = served(
        {
            "policy": {"engine": "fsdp", "devices": [0, 3]},
            "reference": {"devices": [0, 3]},
            "rollout": {"devices": [1, 2], "tensor_parallel": 2, "weight_sync": sync},
            "placement": {"devices": 4, "nodes": 2, "runtime": "ray", "ray_address": address},
        },
        python,
    )
    assert_same(train_run(config(tmp_path, tiny_llama, "run", changes)), in_process)
    until = time.monotonic() + 30
    while len(list(told.glob("*.json"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    follower, leader = sorted(answers_of(told), key=lambda answer: "--headless" not in answer["words"])
    assert "--headless" in follower["words"] and "serve" in follower["words"]
    for rank, answer in enumerate((leader, follower)):
        words = answer["words"]
        said = {name: words[words.index(f"--{name}") + 1] for name in ("nnodes", "node-rank", "tensor-parallel-size")}
        assert said == {"nnodes": "2", "node-rank": str(rank), "tensor-parallel-size": "2"}
    assert leader["words"][leader["words"].index("--master-port") + 1] in follower["words"]
    assert len(leader["prompts"]) == 24


@pytest.mark.parametrize("over", ["a copy on each device", "servers", "a server on both machines"])
def test_a_generation_on_two_machines_writes_the_rows_of_one(
    over: str, address: str, tmp_path: Path, tiny_llama: Path, python: str, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(10)))

    def made(name: str, rollout: dict[str, Any], **placement: Any) -> list[dict[str, Any]]:
        sections = {
            "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
            "data": {"files": "p.jsonl"},
            "output": {"file": name, "rows_per_part": 2},
            "rollout": {"samples_per_prompt": 3, "max_response_tokens": 12, "max_concurrent_sequences": 8} | rollout,
            "placement": {"device": "cpu", "cpu_threads": 1} | placement,
        }
        work: list[tuple[int, int]] = []
        generate_run(
            GenerateConfig.model_validate(sections),
            overwrite=False,
            on_plan=lambda rows, done, notes: None,
            on_work=lambda rows, tokens: work.append((rows, tokens)),
        )
        assert sum(rows for rows, _ in work) == 10 and sum(tokens for _, tokens in work) > 100
        rows: list[dict[str, Any]] = pq.read_table(tmp_path / name).to_pylist()
        return rows

    vllm = {"engine": "vllm", "engine_options": {"python": python}}
    rollout = {} if over == "a copy on each device" else vllm
    alone = made("alone.parquet", rollout)
    assert len(alone) == 10 and len({text for row in alone for text in row["responses"]}) > 20
    split = rollout | ({"tensor_parallel": 4} if "both" in over else {"tensor_parallel": 2} if rollout else {})
    on = {"devices": 4, "nodes": 2, "ray_address": address}
    assert made("there.parquet", split, **on) == alone
    started = 0 if not rollout else 3  # the one alone, and two processes on the machines
    until = time.monotonic() + 30
    while len(list(told.glob("*.json"))) < started and time.monotonic() < until:
        time.sleep(0.1)
    answers = answers_of(told)
    assert len(answers) == started
    assert sum("--headless" in each["words"] for each in answers) == ("both" in over)


@pytest.fixture
def server(python: str, tiny_llama: Path) -> Iterator[str]:
    """One that runs already."""
    port = free_port()
    words = ["-m", "vllm", "--model", str(tiny_llama), "--port", str(port), "--tensor-parallel-size", "1"]
    with subprocess.Popen([python, *words]) as process:
        until = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("sync", ["disk", "collective"])
def test_a_server_that_runs_already(
    sync: str, address: str, in_process: Path, tmp_path: Path, tiny_llama: Path, server: str
) -> None:
    changes: Sections = {
        "policy": {"engine": "fsdp"},
        "rollout": {"engine": "vllm", "endpoints": [server], "weight_sync": sync, "weight_folder": str(tmp_path)},
        "placement": {"devices": 2, "runtime": "ray", "ray_address": address},
    }
    if sync == "collective":
        del changes["rollout"]["weight_folder"]
    assert_same(train_run(config(tmp_path, tiny_llama, "run", changes)), in_process)


def test_a_server_samples_while_the_trainer_works(tmp_path: Path, tiny_llama: Path, server: str) -> None:
    """Asynchronously, without Ray: it finishes the responses that it has begun before it gets new weights, so that each is of
    one version."""
    changes: Sections = {
        "asynchronous": {"mode": "separate", "max_staleness_steps": 2},
        "loss": {"kl_coef": 0.01, "rollout_correction": {"weights": "token"}},
        "rollout": {"engine": "vllm", "endpoints": [server], "weight_sync": "disk", "weight_folder": str(tmp_path)},
    }
    folder = train_run(config(tmp_path, tiny_llama, "run", changes, steps=4))
    assert_each_group_is_trained_once(folder)
    rows = [
        json.loads(line)
        for step in range(1, 5)
        for line in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()
    ]
    echoed = {event["version"]: event["hash"] for event in events(folder) if event["event"] == "weights"}
    assert {row["policy_version"] for row in rows} <= set(echoed) and len(set(echoed.values())) == len(echoed) > 1
    assert not any(row.get("version_spans") for row in rows)
    assert max(line["async/staleness_steps_max"] for line in metrics_of(folder)) in (1.0, 2.0)


# How two ranks share the policy; what the server begins with.
TRAINERS: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp": ({"engine": "fsdp"}, "dummy"),
    "megatron, whose adapter is sent": (
        {"engine": "megatron", "pipeline_parallel": 2, "lora": {"rank": 2}, "optimizer": {"lr": 1e-2}},
        "auto",
    ),
}


@pytest.mark.skipif(not PYTHON, reason="POSTTRAIN_VLLM_PYTHON names no Python with vLLM")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_real_vllm(trainer: str, tmp_path: Path, served_model: Path) -> None:
    """The policy shared out over two ranks, a real vLLM's server in a worker of its own: what is sampled is the policy's."""
    policy, load_format = TRAINERS[trainer]
    changes: Sections = {
        "data": {"max_prompt_tokens": 64},
        "policy": policy | {"devices": [0, 1]},
        "reference": {"devices": [0, 1]},
        "rollout": {
            "engine": "vllm",
            "devices": [2],
            "engine_options": {
                "python": PYTHON,
                "enforce_eager": True,
                "load_format": load_format,
                "startup_timeout_s": 550,
            },
        },
        "placement": {"devices": 3, "runtime": "ray", "start_timeout_s": 600},
    }
    found = metrics_of(train_run(config(tmp_path, served_model, "run", changes)))
    # It began with random weights, or without an adapter: log-probs agree with the trainer's only when what was sent has arrived.
    gaps = [line[name] for line in found[1:] for name in line if name == "gap/mean"]
    assert gaps and max(gaps) < 1e-3
    if "lora" in policy:
        assert found[-1]["reference/kl"] > 2e-3  # the policy is another one by now
