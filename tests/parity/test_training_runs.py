"""Whole runs: with an adapter (sampled with it, saved alone, resumed bit for bit, exported merged), and short of memory."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.run.export import export_checkpoint
from posttrain.run.trackers import Trackers

NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 5 / 4
"""


def make(tmp_path: Path, model: Path, folder: str, **changes: dict[str, Any]) -> RunConfig:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{n}+{n}=", "reward_model": {"ground_truth": str(2 * n)}} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row | {"data_source": "sums"}) + "\n" for row in rows))
    sections: dict[str, dict[str, Any]] = {
        "run": {"total_steps": 2, "folder": str(tmp_path / folder)},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 6},
        "reward": {"workers": 1, "terms": [{"name": "score", "path": str(tmp_path / "reward.py")}]},
        "loss": {"kl_coef": 0.01},
        "policy": {"lora": {"rank": 2, "dropout": 0.1}, "optimizer": {"lr": 3e-2, "weight_decay": 0.0}},
        "checkpoint": {"every_steps": 1},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    return RunConfig.model_validate({name: section | changes.get(name, {}) for name, section in sections.items()})


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/"))} for line in lines]


def samples(folder: Path, step: int) -> str:
    return (folder / "samples" / f"step_{step}.jsonl").read_text()


@pytest.mark.slow
@NEEDS_PEFT
def test_a_run_with_an_adapter(tiny_qwen: Path, tmp_path: Path) -> None:
    run = train_run(make(tmp_path, tiny_qwen, "run"))
    lines = metrics(run)
    divergence = [line["reference/kl"] for line in lines if "reference/kl" in line]
    assert divergence[0] == pytest.approx(0.0, abs=1e-5) and divergence[-1] > 1e-3  # from the model without the adapter
    newest = run / "checkpoints" / "global_step_2" / "policy"
    assert (newest / "adapter_model.safetensors").is_file() and not (newest / "model.safetensors").exists()

    # Killed after its first step and started again, it ends the same.
    shutil.copytree(run, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "global_step_2")
    (tmp_path / "again" / "checkpoints" / "latest").write_text("global_step_1\n")
    again = train_run(make(tmp_path, tiny_qwen, "again"))
    assert metrics(again) == lines and samples(again, 2) == samples(run, 2)
    name = "checkpoints/global_step_2/policy/adapter_model.safetensors"
    assert (again / name).read_bytes() == (run / name).read_bytes()

    export_checkpoint(run, tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    base = AutoModelForCausalLM.from_pretrained(tiny_qwen)
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        assert (exported(ids).logits - base(ids).logits).abs().max() > 1e-2


@pytest.mark.slow
@NEEDS_PEFT
def test_the_sampler_uses_the_adapter(tiny_qwen: Path, tmp_path: Path) -> None:
    """With the same prompts and random numbers, what is sampled after an update is other than without one."""
    trained = train_run(
        make(tmp_path, tiny_qwen, "trained", run={"total_steps": 2, "folder": str(tmp_path / "trained")})
    )
    still = {"lora": {"rank": 2}, "optimizer": {"lr": 1e-12}}
    unmoved = train_run(
        make(tmp_path, tiny_qwen, "still", policy=still, run={"total_steps": 2, "folder": str(tmp_path / "still")})
    )

    def texts(folder: Path, step: int) -> list[str]:
        return [json.loads(line)["response"] for line in samples(folder, step).splitlines()]

    assert texts(trained, 1) == texts(unmoved, 1) and texts(trained, 2) != texts(unmoved, 2)


def test_running_out_of_memory_is_told_and_changes_nothing(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"lora": None, "sequences_per_micro_batch_per_device": 6}
    one_step = {"run": {"total_steps": 1, "folder": str(tmp_path / "plenty")}, "policy": whole}
    plenty = metrics(train_run(make(tmp_path, tiny_qwen, "plenty", **one_step)))
    hidden, told = LogprobScorer.hidden, []

    def limited(self: LogprobScorer, packed: Any) -> Any:
        if torch.is_grad_enabled() and len(packed.token_ids) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return hidden(self, packed)

    monkeypatch.setattr(LogprobScorer, "hidden", limited)
    monkeypatch.setattr(Trackers, "message", lambda self, text: told.append(text))
    one_step["run"] = {"total_steps": 1, "folder": str(tmp_path / "short")}
    short = metrics(train_run(make(tmp_path, tiny_qwen, "short", **one_step)))
    assert any(text.startswith("out of memory with 6 sequences of ") for text in told), told
    for one, other in zip(short, plenty, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
