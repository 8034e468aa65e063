"""A LoRA adapter travels alone between workers, to copies of the model and to servers: the numbers of a run in one process.

The servers are stand-ins that speak as vLLM's do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray_runs import assert_same, config, lines_of
from safetensors.torch import load_file

from posttrain.build.train import train_run
from warm.processes import warm_python

pytest.importorskip("ray")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow

STAND_IN = Path(__file__).with_name("vllm_stand_in.py")
LORA = {"rank": 2, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
FILES = ("adapter_model", "optimizer")
Sections = dict[str, dict[str, Any]]
SAME_PLACE: Sections = {"policy": {"engine": "fsdp"}, "placement": {"devices": 2}}
APART: Sections = {
    "policy": {"engine": "fsdp", "devices": [0, 1]},
    "reference": {"devices": [0, 1]},
    "rollout": {"devices": [2, 3]},
    "placement": {"devices": 4},
}


def run(folder: Path, model: Path, rollout: dict[str, Any], changes: Sections) -> Path:
    changes = changes | {
        "policy": {"lora": LORA} | changes.get("policy", {}),
        "rollout": rollout | changes.get("rollout", {}),
    }
    return train_run(config(folder, model, "run", changes, steps=2))


def adapter_mib(folder: Path) -> float:
    file = folder / "checkpoints" / "global_step_2" / "policy" / "adapter_model.safetensors"
    return float(sum(tensor.nbytes for tensor in load_file(file).values()) / 2**20)


def sent_mib(folder: Path) -> list[float]:
    return [line["speed/weight_sync_mib"] for line in lines_of(folder) if "speed/weight_sync_mib" in line]


def test_copies_of_the_model_are_sent_what_is_trained(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = run(tmp_path / "alone", tiny_llama, {}, {})
    assert sent_mib(alone) == []  # it reads the policy's own weights
    ray = {"placement": {"devices": 2, "runtime": "ray", "ray_address": address}}
    found = run(tmp_path, tiny_llama, {}, SAME_PLACE | ray)
    assert_same(found, alone, files=FILES)
    assert sent_mib(found) == [adapter_mib(alone)] * 2


def test_servers_are_sent_the_adapter(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {warm_python()} {STAND_IN} {tmp_path} "$@"\n')
    python.chmod(0o755)
    vllm = {"engine": "vllm", "engine_options": {"python": str(python)}, "max_concurrent_sequences": 8}
    (tmp_path / "alone").mkdir()
    alone = run(tmp_path / "alone", tiny_llama, vllm, {})
    ray = {"placement": {"devices": 4, "runtime": "ray", "ray_address": address}}
    found = run(tmp_path, tiny_llama, vllm, APART | ray)
    assert_same(found, alone, files=FILES)
    assert sent_mib(found) == sent_mib(alone) == [adapter_mib(alone)] * 2
    whole = run(
        tmp_path / "alone", tiny_llama, vllm | {"weight_sync": "disk"}, {"run": {"folder": str(tmp_path / "w")}}
    )
    assert sent_mib(whole)[0] > 20 * adapter_mib(alone)
