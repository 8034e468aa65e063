"""Workers write profiles of what they do, and the numbers of the run stay what they are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from ray_runs import config

from posttrain.backends.rollout.native.packed_products import NAME
from posttrain.build.train import train_run

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def test_the_workers_of_the_chosen_ranks_write_traces(address: str, tmp_path: Path, tiny_llama: Path) -> None:
    changes = {
        "policy": {"engine": "fsdp"},
        "placement": {"devices": 2, "runtime": "ray", "ray_address": address},
        "profiling": {"steps": [1], "phases": ["update", "rollout"], "ranks": [1]},
    }
    folder = train_run(config(tmp_path, tiny_llama, "run", changes, steps=1))
    files = sorted((folder / "profiles").iterdir())
    assert [file.name for file in files] == [
        "step_1_rollout.json.gz",
        "step_1_rollout_trainer_rank_1.json.gz",
        "step_1_update.json.gz",
        "step_1_update_trainer_rank_1.json.gz",
    ]
    names = [
        {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]} for file in files
    ]
    products = {"aten::mm", NAME}  # the sampler's own where it has kernels
    assert [bool(products & each) for each in names] == [False, True, False, True]  # the models are in the workers
    assert any(str(name).startswith("autograd::") for name in names[3])
