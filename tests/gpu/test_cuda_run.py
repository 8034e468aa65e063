"""A run on a GPU makes the steps that the same run makes on the CPU.

`pytest -m gpu`; POSTTRAIN_TEST_DEVICE=cpu runs the same lines without a GPU, to see that the test itself is right.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from posttrain.build.train import train_run
from posttrain.config import RunConfig

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("POSTTRAIN_TEST_DEVICE", "cuda")
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 5 / 4
"""


def metrics(folder: Path, model: Path, device: str, dtype: str = "float32") -> list[dict[str, float]]:
    """Three steps of two prompts x four samples with a reference and two updates each."""
    (folder / "reward.py").write_text(REWARD)
    rows = [{"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": ""}} for n in range(6)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_folder = folder / f"run-{device}-{dtype}"
    config = RunConfig.model_validate(
        {
            "run": {"total_steps": 3, "folder": str(run_folder)},
            "model": {"path": str(model), "compute_dtype": dtype},
            "data": {"train_files": [str(folder / "train.jsonl")], "prompts_per_step": 2},
            "rollout": {"samples_per_prompt": 4, "max_response_tokens": 8},
            "reward": {"terms": [{"name": "score", "path": str(folder / "reward.py")}]},
            "loss": {"kl_coef": 0.01},
            "policy": {"sequences_per_mini_batch": 4, "sequences_per_micro_batch_per_device": 2},
            "tracking": {"trackers": []},
            "placement": {"device": device},
        }
    )
    train_run(config)
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def there_is_a_gpu() -> None:
    if DEVICE.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")


def test_the_steps_are_those_of_the_cpu(tmp_path: Path, tiny_llama: Path) -> None:
    """float32 without TF32: the same tokens are drawn, and sums in another order differ by 1e-6 of their size or so."""
    there, here = (metrics(tmp_path, tiny_llama, device) for device in (DEVICE, "cpu"))
    for one, other in zip(there, here, strict=True):
        assert one["gap/max"] < 1e-4  # between sampler and trainer, on the device
        for name in ("reward/mean", "response/length_mean"):
            assert one[name] == other[name]
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


def test_bfloat16_samples_what_it_trains(tmp_path: Path, tiny_llama: Path) -> None:
    for line in metrics(tmp_path, tiny_llama, DEVICE, "bfloat16"):
        assert line["gap/mean"] < 0.05  # 8 bits of each number


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_run_gives_the_same_bytes(tmp_path: Path, tiny_llama: Path, dtype: str) -> None:
    """Nothing is added up in an order that changes from run to run."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other = (metrics(tmp_path / name, tiny_llama, DEVICE, dtype) for name in ("one", "other"))
    for here, there in zip(one, other, strict=True):
        differing = [
            name for name in here if not name.startswith(("time/", "speed/", "memory/")) and here[name] != there[name]
        ]
        assert not differing
