"""Whole runs on a base in 4 bits: the same bytes after a kill, and an export that is the rounded base and the adapter."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.parity.test_training_runs import make, metrics, samples

from posttrain.build.sft import sft_run
from posttrain.build.train import train_run
from posttrain.config import SftConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.quantized import FILE, round_like
from posttrain.run.export import export_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
]
ADAPTER = "checkpoints/global_step_2/policy/adapter_model.safetensors"
POLICY: dict[str, Any] = {
    "lora": {"rank": 2, "quantize": "nf4"},
    "optimizer": {"lr": 3e-2, "weight_decay": 0.0},
    "schedule": {"name": "constant"},
}


def killed_after_its_first_step(run: Path, again: Path) -> None:
    """Copy a run of two steps as a kill in the second one would have left it."""
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints/global_step_2")
    (again / "checkpoints/latest").write_text("global_step_1\n")


def check_export(run: Path, base: Path, out: Path) -> None:
    """Compare the exported weights with those of the rounded base plus alpha / rank * B @ A, and with the base's own."""
    export_checkpoint(run, out)
    policy = run / "checkpoints/global_step_2/policy"
    assert json.loads((policy / FILE).read_text())["kind"] == "nf4"
    plain = load_causal_lm(str(base), dtype=torch.float32)
    own = {name: weight.clone() for name, weight in plain.state_dict().items()}
    round_like(plain, policy, head=None)
    rounded = plain.state_dict()
    exported, adapter = load_file(out / "model.safetensors"), load_file(policy / "adapter_model.safetensors")
    settings = peft.LoraConfig.from_pretrained(str(policy))
    layers = [name.removesuffix(".lora_A.weight") for name in adapter if name.endswith(".lora_A.weight")]
    assert layers
    for layer in layers:
        name = layer.removeprefix("base_model.model.") + ".weight"
        added = adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
        assert added.abs().max() > 0
        wanted = rounded[name] + settings.lora_alpha / settings.r * added
        torch.testing.assert_close(exported[name], wanted, rtol=0, atol=1e-5)
        assert (rounded[name] - own[name]).abs().max() > 1e-3  # the base is another one in 4 bits


def test_a_grpo_run_on_a_rounded_base(served_model: Path, tmp_path: Path) -> None:
    run = train_run(make(tmp_path, served_model, "run", policy=POLICY))
    killed_after_its_first_step(run, tmp_path / "again")
    again = train_run(make(tmp_path, served_model, "again", policy=POLICY))
    assert metrics(again) == metrics(run) and samples(again, 2) == samples(run, 2)
    assert (again / ADAPTER).read_bytes() == (run / ADAPTER).read_bytes()
    check_export(run, served_model, tmp_path / "exported")


def test_an_sft_run_on_a_rounded_base(served_model: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(folder: str) -> SftConfig:
        return SftConfig.model_validate(
            {
                "model": {"path": str(served_model), "compute_dtype": "float32"},
                "data": {"train_files": [str(tmp_path / "train.jsonl")], "sequences_per_step": 4, "max_tokens": 64},
                "run": {"folder": str(tmp_path / folder), "total_steps": 2},
                "policy": POLICY,
                "checkpoint": {"every_steps": 1},
                "tracking": {"trackers": []},
                "placement": {"device": "cpu", "cpu_threads": 1},
            }
        )

    run = sft_run(config("run"))
    losses = [line["policy/loss"] for line in metrics(run) if "policy/loss" in line]
    assert losses[1] < losses[0]
    killed_after_its_first_step(run, tmp_path / "again")
    again = sft_run(config("again"))
    assert metrics(again) == metrics(run)
    assert (again / ADAPTER).read_bytes() == (run / ADAPTER).read_bytes()
    check_export(run, served_model, tmp_path / "exported")
