"""SkyRL's override list for several turns, two steps of it on a tiny model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.train import train_run
from posttrain.dialects.detect import read_config

pytest.importorskip("skyrl_gym")

EXAMPLE = Path(__file__).parents[2] / "examples/skyrl_multi_turn.sh"


def overrides_of(script: Path) -> list[str]:
    """The words behind --dialect skyrl, with $HOME in the user's place."""
    text = script.read_text().partition("--dialect skyrl")[2].replace("\\\n", " ").replace("$HOME", "/home/user")
    return [word for word in shlex.split(text) if word != "$@"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    lines = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "env_class": "gsm8k_multi_turn",
            "reward_spec": {"method": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number},
        }
        for number in range(4)
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


SPLIT = ["generator.use_conversation_multi_turn=false", "+generator.step_wise_trajectories=true"]


@pytest.mark.parametrize("changes", [[], pytest.param(SPLIT, marks=pytest.mark.slow)])
def test_two_steps(changes: list[str], rows: Path, tiny_llama: Path, tmp_path: Path) -> None:
    ours: dict[str, Any] = {
        "data.train_data": f"['{rows}']",
        "data.val_data": f"['{rows}']",
        "trainer.policy.model.path": tiny_llama,
        "trainer.max_training_steps": 2,
        "trainer.train_batch_size": 2,
        "trainer.policy_mini_batch_size": 2,
        "trainer.ckpt_path": tmp_path / "checkpoints",
        "generator.sampling_params.max_generate_length": 8,
        "environment.skyrl_gym.max_env_workers": 2,
        "+posttrain.run.folder": tmp_path / "run",
        "+posttrain.placement.cpu_threads": 1,
        "+posttrain.model.compute_dtype": "float32",
        "generator.n_samples_per_prompt": 2,
        "trainer.micro_train_batch_size_per_gpu": 4,
    }
    words = [*overrides_of(EXAMPLE), *(f"{key}={value}" for key, value in ours.items()), *changes]
    loaded = read_config(None, words, "skyrl")
    assert not loaded.problems and not loaded.unsupported, [*map(str, loaded.problems), *map(str, loaded.unsupported)]
    folder = train_run(loaded.config)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [0, 1, 2]
    last = metrics[2]
    assert last["reward/invalid_share"] == 0 and "policy/loss" in last
    # Gibberish holds no answer, so every episode takes its three turns, and the environment counts them.
    assert last["episode/turns_mean"] == last["environment/steps"] == 3
    assert last["gap/max"] < 1e-3  # nats: what was sampled is what is trained, also behind observations
    samples = [json.loads(line) for line in (folder / "samples/step_2.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 2
    assert all("tentative numeric answer" in sample["turns"][0]["observation"] for sample in samples)
