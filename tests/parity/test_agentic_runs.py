"""Runs over several turns, two steps each on a tiny model: ROLL's agentic example, and estimators that look at turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.train import train_run
from posttrain.dialects.detect import read_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(path: str, *overrides: str) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Metrics of every step, and the samples of the last."""
    loaded = read_config(path, list(overrides), None)
    assert not loaded.problems and not loaded.unsupported, [*map(str, loaded.problems), *map(str, loaded.unsupported)]
    folder = train_run(loaded.config)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().strip().split("\n")]
    samples = [json.loads(line) for line in (folder / "samples/step_2.jsonl").read_text().strip().split("\n")]
    return metrics, samples


def test_rolls_agentic_example_runs(tiny_llama: Path, tmp_path: Path) -> None:
    metrics, samples = run(
        str(EXAMPLES / "roll_agentic.yaml"),
        f"pretrain={tiny_llama}",
        "max_steps=2",
        "sequence_length=600",
        "rollout_batch_size=8",
        "val_batch_size=4",
        "actor_train.training_args.per_device_train_batch_size=4",
        "actor_train.training_args.gradient_accumulation_steps=2",
        f"+posttrain.run.folder={tmp_path / 'run'}",
        "+posttrain.environment.workers=0",
        "+posttrain.placement.cpu_threads=1",
        "+posttrain.model.compute_dtype=float32",
    )
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert "validation/FrozenLake/reward_mean" in metrics[0]
    assert "policy/loss" in metrics[2] and metrics[2]["reward/invalid_share"] == 0
    assert [sample["data_source"] for sample in samples].count("FrozenLake") in (
        4,
        8,
    )  # 3 of 4 beginnings over two steps
    lake = next(sample for sample in samples if sample["data_source"] == "FrozenLake")
    # Gibberish has no action: four turns of -0.05, and the lake as it was. A lucky answer would move.
    assert 1 <= len(lake["turns"]) <= 4
    assert lake["reward"] == pytest.approx(sum(turn["reward"] for turn in lake["turns"]))
    assert "You are good at games." in lake["prompt"] and "<answer>Left</answer>" in lake["turns"][0]["observation"]


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["gigpo", "step_reinforce", "agentic_reinforce", "grpo"])
def test_estimators_over_turns(estimator: str, tiny_llama: Path, tmp_path: Path) -> None:
    by_turn = estimator in ("gigpo", "step_reinforce")
    metrics, samples = run(
        str(EXAMPLES / "grpo_guess_number.yaml"),
        f"model.path={tiny_llama}",
        "model.compute_dtype=float32",
        f"run.folder={tmp_path / 'run'}",
        "run.total_steps=2",
        "data.prompts_per_step=2",
        "rollout.samples_per_prompt=4",
        "policy.sequences_per_mini_batch=8",
        "environment.train_episodes=4",
        "environment.validation_episodes=2",
        "environment.max_turns=3",
        "environment.settings.action_pattern='(.)'",  # any first character: a tiny model says few digits
        "environment.settings.format_penalty=-0.5",
        f"environment.sample_per_turn={str(by_turn).lower()}",
        f"advantage.name={estimator}",
        "placement.cpu_threads=1",
    )
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert metrics[0]["validation/guess_number/turns_mean"] == 3
    assert len(samples) == 8 and all(len(sample["turns"]) <= 3 for sample in samples)
    assert metrics[2]["environment/num_actions"] == pytest.approx(sum(len(s["turns"]) for s in samples) / 8)
    if estimator == "step_reinforce":  # its returns are those of the penalties: never 0 where a turn went wrong
        assert metrics[2]["advantage/abs_mean"] > 0.4


def test_tools_are_offered_and_the_answer_is_scored(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "data_source": "sums"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
                "data": {"train_files": [str(tmp_path / "rows.jsonl")], "prompts_per_step": 2},
                "run": {"folder": str(tmp_path / "run"), "total_steps": 2},
                "environment": {"name": "tools", "settings": {"tools": ["calculator"]}, "max_turns": 2, "workers": 0},
                "rollout": {"samples_per_prompt": 2, "max_response_tokens": 6},
                "reward": {"terms": [{"name": "exact_match"}]},
                "placement": {"cpu_threads": 1},
            }
        )
    )
    metrics, samples = run(str(tmp_path / "run.yaml"))
    assert metrics[-1]["reward/term/exact_match"] == metrics[-1]["reward/mean"]  # the environment gives none of its own
    assert metrics[-1]["environment/tool_calls"] == 0.0 and metrics[-1]["episode/stop/answered"] == 1.0
    assert all(len(sample["turns"]) == 1 and sample["data_source"] == "sums" for sample in samples)
