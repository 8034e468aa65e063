"""Whole runs on a tiny model of what needs more than rewards: greedy baselines, reward terms, probabilities, corrections."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.plan.checks.train import check

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 5 / 4

def short(data_source, solution_str, ground_truth, extra_info):
    return -len(solution_str) / 8
"""

Make = Callable[..., RunConfig]


@pytest.fixture
def make(tmp_path: Path, tiny_llama: Path) -> Make:
    """A configuration of two steps of two prompts x four samples, one update each; keyword arguments replace sections."""
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": "0"}} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 8},
        "reward": {"terms": [{"name": name, "path": str(tmp_path / "reward.py")} for name in ("score", "short")]},
        "policy": {"sequences_per_micro_batch_per_device": 4, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"at_end": False},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }

    def make_config(folder: str, **changes: Any) -> RunConfig:
        run = {"seed": 1, "total_steps": 2, "folder": str(tmp_path / folder)}
        config = RunConfig.model_validate(sections | {"run": run} | changes)
        assert check(config) == []
        return config

    return make_config


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all("nonfinite" not in line for line in lines)
    return [line for line in lines if line["step"] > 0]


def samples(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()]


CORRECTION = {"weights": "token", "reject": ["sequence_mean_k3"], "reject_bounds": ["5.0"]}
RUNS: dict[str, dict[str, Any]] = {
    "remax": {"advantage": {"name": "remax"}},
    "gdpo": {"advantage": {"name": "gdpo", "terms": ["short", "score"], "term_weights": [0.5, 1.0]}},
    "optimal_token_baseline": {"advantage": {"name": "optimal_token_baseline"}},
    "tir_optimal_token_baseline": {"advantage": {"name": "tir_optimal_token_baseline"}},
    "agentic_reinforce": {"advantage": {"name": "agentic_reinforce", "gamma": 0.9, "whiten": True}},
    "topr": {"loss": {"name": "topr"}},
    "rollout_is": {"loss": {"name": "rollout_is"}},
    "prompt mean": {"loss": {"aggregation": "prompt_mean"}},
    "sum over a norm": {"loss": {"aggregation": "sequence_mean_token_sum_norm", "sft_coef": 0.1}},
    "critic's sum over a norm": {
        "advantage": {"name": "gae"},
        "critic": {"aggregation": "sequence_mean_token_sum_norm"},
    },
    "correction": {"loss": {"rollout_correction": CORRECTION}},
    "sampler's log-probs, two updates": {
        "loss": {"rollout_correction": {"use_rollout_logprobs": True}},
        "policy": {"sequences_per_mini_batch": 4, "sequences_per_micro_batch_per_device": 4},
    },
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_it_runs_from_a_configuration_to_updates(make: Make, changes: dict[str, Any]) -> None:
    for line in steps(train_run(make("run", **changes))):
        assert line["policy/skipped_updates"] == 0 and line["policy/grad_norm"] > 0
        assert line["gap/max"] < 1e-4  # the same weights in the same precision


def test_the_greedy_baseline_is_taken_from_every_reward(make: Make) -> None:
    folder = train_run(make("run", advantage={"name": "remax"}))
    assert steps(folder)[0]["time/baseline_s"] > 0
    drawn = samples(folder)
    by_prompt: dict[str, set[float]] = {}
    for sample in drawn:
        by_prompt.setdefault(sample["prompt_id"], set()).add(round(sample["reward"] - sample["advantage"], 5))
    assert len(by_prompt) == 2 and all(len(baselines) == 1 for baselines in by_prompt.values())


def test_a_correction_of_nothing_changes_next_to_nothing(make: Make) -> None:
    """Sampler and trainer are the same weights in float32: all weights are 1, and nothing is rejected."""
    plain = steps(train_run(make("plain")))
    fixed = steps(train_run(make("fixed", loss={"rollout_correction": CORRECTION})))
    for left, right in zip(plain, fixed, strict=True):
        assert right["correction/weight_mean"] == pytest.approx(1, abs=1e-4)
        assert right["correction/effective_token_share"] == pytest.approx(1, abs=1e-4)
        assert right["correction/rejected_token_share"] == right["correction/rejected_response_share"] == 0
        assert left["policy/loss"] == pytest.approx(right["policy/loss"], abs=1e-4)
        assert left["policy/grad_norm"] == pytest.approx(right["policy/grad_norm"], rel=1e-3)


def test_a_narrow_rule_takes_tokens_out_of_the_loss(make: Make) -> None:
    """With top-k the sampler draws from a cut distribution, and the trainer scores by the whole one."""
    rollout = {"samples_per_prompt": 4, "max_response_tokens": 8, "top_k": 20}
    correction = {"reject": ["token_k1"], "reject_bounds": ["0.9_1.1"], "weights": "sequence"}
    folder = train_run(make("run", rollout=rollout, loss={"rollout_correction": correction}))
    for line in steps(folder):
        assert 0 < line["correction/rejected_token_share"] <= 1
        assert line["correction/weight_max"] <= 2
