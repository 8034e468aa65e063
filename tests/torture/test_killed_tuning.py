"""Runs that learn from preferences, from a teacher, or on a base in 4 bits, killed by SIGKILL at random instants and started
again, end with the bytes of a run that was left alone: metrics, samples, weights, averages, places in the data."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import killing
import pytest
from runs import result, tiny_run

from posttrain.build.sft import sft_run
from posttrain.build.train import train_run
from posttrain.build.tune import tune_run
from posttrain.config import SftConfig
from posttrain.config.tune import TuneConfig
from posttrain.models.tiny import write_tiny_model

Run = Callable[[str], Path]
STEPS = 12


def preferences(folder: Path, model: Path, method: dict[str, Any]) -> Run:
    """Seven pairs and four sequences a step: epochs end within steps, and another order begins."""
    pairs = [{"prompt": f"say {n}", "chosen": f"{n}! " * (n % 3 + 1), "rejected": f"no {n}"} for n in range(7)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    sections = common(model) | {
        "method": method,
        "data": {
            "train_files": [str(folder / "pairs.jsonl")],
            "validation_files": [str(folder / "pairs.jsonl")],
            "sequences_per_step": 4,
        },
        "validation": {"every_steps": 5},
    }
    return lambda name: tune_run(
        TuneConfig.model_validate(sections | {"run": {"total_steps": STEPS, "folder": str(folder / name)}})
    )


def taught_texts(folder: Path, model: Path, teacher: Path) -> Run:
    """Distillation on texts, over the whole vocabulary."""
    texts = [{"prompt": f"say {n}", "response": f"{n}! " * (n % 3 + 1)} for n in range(7)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    sections = common(model) | {
        "data": {"train_files": [str(folder / "texts.jsonl")], "sequences_per_step": 3},
        "distillation": {"teachers": {"other": {"path": str(teacher)}}},
    }
    return lambda name: sft_run(
        SftConfig.model_validate(sections | {"run": {"total_steps": STEPS, "folder": str(folder / name)}})
    )


def taught_responses(folder: Path, model: Path, teacher: Path) -> Run:
    """Distillation on the student's own responses, the teacher's answers as advantages."""
    distillation = {
        "teachers": {"other": {"path": str(teacher)}},
        "divergence": {"name": "sampled_kl"},
        "enters": "advantage",
    }
    changes = {"distillation": distillation, "loss": {}}
    return lambda name: train_run(tiny_run(folder, model, name, steps=STEPS, **changes))


def on_four_bits(folder: Path, model: Path) -> Run:
    """GRPO of an adapter on a base that is rounded when it is loaded, that is at every start."""
    policy = {
        "lora": {"rank": 4, "quantize": "nf4", "dropout": 0.1},
        "optimizer": {"lr": 1e-2},
        "sequences_per_micro_batch_per_device": 2,
    }
    return lambda name: train_run(tiny_run(folder, model, name, steps=STEPS, policy=policy))


def texts_on_four_bits(folder: Path, model: Path) -> Run:
    """The same, by fine-tuning on texts."""
    texts = [{"prompt": f"say {n}", "response": f"{n}! " * (n % 3 + 1)} for n in range(7)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    sections = common(model)
    sections["policy"] = sections["policy"] | {"lora": {"rank": 4, "quantize": "nf4"}}
    data = {"data": {"train_files": [str(folder / "texts.jsonl")], "sequences_per_step": 3}}
    return lambda name: sft_run(
        SftConfig.model_validate(sections | data | {"run": {"total_steps": STEPS, "folder": str(folder / name)}})
    )


def common(model: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "compute_dtype": "float32"},
        "policy": {"optimizer": {"lr": 1e-3}, "sequences_per_micro_batch_per_device": 2},
        "checkpoint": {"every_steps": 2, "keep_last": 2},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "reward_model", "taught texts", "taught responses"])
def test_random_kills(tmp_path: Path, tiny_llama: Path, kind: str) -> None:
    if kind.startswith("taught"):
        teacher = write_tiny_model(tmp_path / "teacher", "llama", seed=7)
        run = (taught_texts if kind == "taught texts" else taught_responses)(tmp_path, tiny_llama, teacher)
    else:
        run = preferences(tmp_path, tiny_llama, {"name": kind})
    killed_and_compared(run, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("made", [on_four_bits, texts_on_four_bits])
def test_random_kills_of_an_adapter_on_four_bits(
    tmp_path: Path, served_model: Path, made: Callable[[Path, Path], Run]
) -> None:
    expected = killed_and_compared(made(tmp_path, served_model), tmp_path)
    assert any(path.endswith("policy/base_quantization.json") for path in expected)


def killed_and_compared(run: Run, folder: Path) -> dict[str, bytes]:
    """Run it once alone and once with kills, and compare. Returns: the files of the run."""
    straight = run("straight")
    assert killing.run_with_kills(lambda: run("killed"), folder / "killed", straight, kills=4) >= 2
    expected = result(straight)
    assert result(folder / "killed") == expected
    assert any("optimizer.safetensors" in path for path in expected)
    return expected
