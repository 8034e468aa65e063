"""Whole runs on a tiny model with everything that can happen between scores and advantages; each resumes exactly."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from posttrain.backends.reward_model import judge
from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.errors import ModelError, RunInterrupted, RunStopped
from posttrain.loops import rl_sync
from posttrain.models.tiny import draw_weights
from posttrain.records.trajectories import Outcome, Reward, Trajectory
from posttrain.steps import rl_step

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 5 / 4

def coarse(data_source, solution_str, ground_truth, extra_info):
    return float(sum(solution_str.encode()) % 3 == 0)

def flat(data_source, solution_str, ground_truth, extra_info):
    return 0.1
"""

Make = Callable[..., RunConfig]


@pytest.fixture
def make(tmp_path: Path, tiny_llama: Path) -> Make:
    """A configuration of four steps of two prompts x three samples, one update each; keyword arguments change sections."""
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [
        {"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": str(2 * n)}} for n in range(10)
    ]
    for name, part in (("train", rows), ("validation", rows[:2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    sections: dict[str, dict[str, Any]] = {
        "run": {"seed": 1, "total_steps": 4},
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 8},
        "reward": {"terms": [term(tmp_path)]},
        "policy": {"sequences_per_micro_batch_per_device": 2, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"every_steps": 2},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }

    def make_config(folder: str, **changes: dict[str, Any]) -> RunConfig:
        merged = {name: section | changes.get(name, {}) for name, section in sections.items()}
        merged |= {name: section for name, section in changes.items() if name not in merged}
        merged["run"] = merged["run"] | {"folder": str(tmp_path / folder)}
        return RunConfig.model_validate(merged)

    return make_config


def term(folder: Path, name: str = "score") -> dict[str, Any]:
    return {"name": name, "path": str(folder / "reward.py")}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of steps 1, 2, ..., without times and speeds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/"))} for line in lines if line["step"]]


def samples_of(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()]


class PowerCut(Exception):
    """The process ends without a word."""


def in_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Do something in the middle of a step, when the rewards of the step have been taken in."""
    real, seen = rl_step.estimate_advantages, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == step:
            act()
        return real(*args, **kwargs)

    monkeypatch.setattr(rl_step, "estimate_advantages", counted)


def power_cut() -> None:
    raise PowerCut


# ------------------------------------------------------------------------------------------------- exact resumption

FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "running moments, clip, adaptive KL": {
        "reward": {
            "normalize_mean": "running",
            "normalize_std": "running",
            "clip": 1.0,
            "kl": {"coef": 0.1, "target": 1e-4, "horizon_sequences": 20},
        },
    },
    "overlong, zero, masking, whitening": {
        "reward": {"overlong_buffer_tokens": 6, "zero_unless_stopped": True},
        "loss": {"mask_truncated": True},
        "advantage": {"name": "reinforce_plus_plus", "whiten_rewards": True, "whiten": True, "clip": 1.0},
    },
    "refill": {"group_filter": {"strategy": "refill"}},
    "replace": {"group_filter": {"strategy": "replace", "min_kept_share": 0.5}},
    "drop": {"group_filter": {"strategy": "drop"}},
}


@pytest.mark.parametrize(
    "feature", [name if name == "replace" else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES]
)
def test_run_that_died_goes_on_exactly(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    """Dead in step 4 after its rewards were taken in; the checkpoint is of step 2."""
    changes = {name: dict(section) for name, section in FEATURES[feature].items()}
    name = "coarse" if "group_filter" in changes else "score"
    changes["reward"] = {"terms": [term(tmp_path, name)], **changes.get("reward", {})}
    straight = train_run(make("straight", **changes))
    with monkeypatch.context() as patch:
        in_step(patch, 4, power_cut)
        with pytest.raises(PowerCut):
            train_run(make("died", **changes))
    died = train_run(make("died", **changes))
    assert lines_of(died) == lines_of(straight)
    for path in ("policy/model.safetensors", "policy/optimizer.safetensors", "run.json"):
        one, other = (folder / "checkpoints/global_step_4" / path for folder in (straight, died))
        assert one.read_bytes() == other.read_bytes(), path
    for step in range(1, 5):
        assert samples_of(died, step) == samples_of(straight, step)


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["running moments, clip, adaptive KL", "overlong, zero, masking, whitening"])
def test_micro_batches_change_nothing_but_rounding(make: Make, feature: str, tmp_path: Path) -> None:
    changes = {name: dict(section) for name, section in FEATURES[feature].items()}
    changes["reward"] = {"terms": [term(tmp_path)], **changes["reward"]}
    first = train_run(make("first", run={"total_steps": 2}, **changes))
    changes["reference"] = {"sequences_per_micro_batch_per_device": 1}
    changes["policy"] = {"sequences_per_micro_batch_per_device": 6, "optimizer": {"lr": 1e-3}}
    for one, other in zip(
        lines_of(first), lines_of(train_run(make("second", run={"total_steps": 2}, **changes))), strict=True
    ):
        for name, value in one.items():
            if not name.startswith("gap/"):
                assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


# ------------------------------------------------------------------------------------------------ KL in the reward


def test_kl_in_the_reward_is_0_at_first_and_steered_as_written(make: Make) -> None:
    kl = {"coef": 0.1, "target": 1e-6, "horizon_sequences": 60, "estimator": "k3"}
    reward = {"kl": kl, "terms": make("x").reward.model_dump()["terms"]}
    lines = lines_of(train_run(make("run", reward=reward, run={"total_steps": 3})))
    assert lines[0]["reward/kl"] == pytest.approx(0, abs=1e-6)  # the reference is the policy
    assert lines[0]["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)  # old log-probs of the same weights
    coefs = [line["reward/kl_coef"] for line in lines]
    for before, after, line in zip(coefs, coefs[1:], lines, strict=False):
        error = min(max(line["reward/kl"] / 1e-6 - 1, -0.2), 0.2)
        assert after == before * (1 + error * 6 / 60)  # six sequences
    assert coefs[0] == 0.1 and coefs[2] > coefs[1]  # one step of learning moves it far beyond 1e-6


def test_kl_in_the_reward_changes_what_is_learned(make: Make) -> None:
    def weights(folder: str, coef: float) -> bytes:
        reward = {"kl": {"coef": coef}, "terms": make("x").reward.model_dump()["terms"]}
        path = train_run(make(folder, reward=reward, run={"total_steps": 2}))
        return (path / "checkpoints/global_step_2/policy/model.safetensors").read_bytes()

    assert weights("small", 0.01) != weights("large", 10.0)


# -------------------------------------------------------------------------------------------------- dynamic sampling


def test_refill_fills_every_step_with_groups_that_differ(make: Make, tmp_path: Path) -> None:
    folder = train_run(make("run", reward={"terms": [term(tmp_path, "coarse")]}, group_filter={"strategy": "refill"}))
    lines = lines_of(folder)
    for step, line in enumerate(lines, start=1):
        samples = samples_of(folder, step)
        groups: dict[int, set[float]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(row // 3, set()).add(sample["reward"])
        assert len(groups) == 2 and all(len(rewards) > 1 for rewards in groups.values())
        assert line["rollout/groups_kept"] == line["step/prompts"] == 2
        assert line["rollout/groups_sampled"] == 2 * line["rollout/batches"]
        assert line["rollout/groups_passed"] >= 2 and line["group/no_signal_share"] == 0
    drawn = sum(line["rollout/batches"] for line in lines)
    assert drawn > 4  # otherwise this seed shows nothing
    assert lines[-1]["progress/epoch"] == drawn / 5  # ten prompts, two at a time


def test_equal_rewards_under_refill_stop_with_a_clear_message(make: Make, tmp_path: Path) -> None:
    config = make(
        "run",
        reward={"terms": [term(tmp_path, "flat")]},
        group_filter={"strategy": "refill", "max_batches": 3},
    )
    with pytest.raises(RunStopped) as raised:
        train_run(config)
    text = str(raised.value)
    assert text.startswith(
        "0 of 6 sampled groups passed the group filter (reward: standard deviation above 0) in 3 batches"
    )
    assert "a larger rollout.samples_per_prompt" in text
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "stopped"


def test_drop_of_every_group_is_a_skipped_step_that_leaves_its_samples(make: Make, tmp_path: Path) -> None:
    config = make(
        "run",
        run={"max_skipped_steps": 2},
        reward={"terms": [term(tmp_path, "flat")]},
        group_filter={"strategy": "drop"},
        tracking={"trackers": [], "samples_every_steps": None},
    )
    with pytest.raises(RunStopped, match="2 steps in a row made no update"):
        train_run(config)
    line = lines_of(tmp_path / "run")[-1]
    assert (line["rollout/groups_kept"], line["policy/skipped_updates"]) == (0.0, 1.0)
    assert [sample["advantage"] for sample in samples_of(tmp_path / "run", 2)] == [None] * 6


@pytest.mark.slow
def test_stop_while_groups_are_looked_for_loses_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third batch on no group passes; SIGTERM comes in the fourth batch of step 3."""
    straight = train_run(make("straight"))
    real, batches = rl_sync.collect, []

    def interrupted(*args: Any, **options: Any) -> Any:
        batches.append(1)
        if len(batches) == 6:
            signal.raise_signal(signal.SIGTERM)
        return real(*args, **options)

    passes = rl_step.Selection._passes
    with monkeypatch.context() as patch:
        patch.setattr(rl_sync, "collect", interrupted)
        patch.setattr(rl_step.Selection, "_passes", lambda self, group: len(batches) < 3 and passes(self, group))
        with pytest.raises(RunInterrupted, match=r"stopped by SIGTERM in step 3") as raised:
            train_run(
                make("run", group_filter={"strategy": "refill", "above_std": None}, checkpoint={"every_steps": None})
            )
    assert raised.value.exit_code == 75
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2]
    again = train_run(
        make("run", group_filter={"strategy": "refill", "above_std": None}, checkpoint={"every_steps": None})
    )
    # Every group passes: what is trained on is the same as without a filter.
    found, wanted = (
        [{k: v for k, v in line.items() if not k.startswith("rollout/")} for line in lines_of(folder)]
        for folder in (again, straight)
    )
    assert found == wanted


# ------------------------------------------------------------------------------------------------------ reward model


@pytest.fixture
def reward_model(tiny_llama: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "rm"
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(tiny_llama, num_labels=1), dtype=torch.float32
    )
    draw_weights(model, 5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("own_template", [False, True])
def test_reward_model_beside_a_term_in_training_and_validation(
    make: Make, tmp_path: Path, reward_model: Path, own_template: bool
) -> None:
    model = {"path": str(reward_model), "weight": 0.5, "own_template": own_template}
    folder = train_run(
        make(
            "run",
            run={"total_steps": 1},
            reward={"terms": [term(tmp_path)], "model": model},
            data={**make("x").data.model_dump(), "validation_files": [str(tmp_path / "validation.jsonl")]},
        )
    )
    held_out = [json.loads(line) for line in (folder / "validation/step_1.jsonl").read_text().splitlines()]
    samples = samples_of(folder, 1)
    for sample in [*samples, *held_out]:
        terms = sample["reward_terms"]
        assert sample["reward"] == pytest.approx(terms["score"] + 0.5 * terms["model"])
    assert len({sample["reward_terms"]["model"] for sample in samples}) == 6
    mean = sum(sample["reward_terms"]["model"] for sample in samples) / 6
    assert lines_of(folder)[0]["reward/term/model"] == pytest.approx(mean)


def test_reward_model_alone(make: Make, reward_model: Path) -> None:
    folder = train_run(make("run", run={"total_steps": 2}, reward={"terms": [], "model": {"path": str(reward_model)}}))
    for sample in samples_of(folder, 2):
        assert sample["reward_terms"] == {"model": sample["reward"]}
    assert lines_of(folder)[0]["advantage/abs_mean"] > 0.1


def test_reward_model_with_another_tokenizer_is_refused_before_anything_is_written(
    make: Make, tmp_path: Path, reward_model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(reward_model)
    with pytest.raises(ModelError, match="another tokenizer than the policy"):
        train_run(make("run", reward={"terms": [], "model": {"path": str(reward_model)}}))
    assert not (tmp_path / "run").exists()


def test_a_judge_of_the_runs_own_grades_what_the_policy_sampled(
    make: Make, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge is the tiny model itself, whose answers are no verdicts: here the sum of their bytes decides."""
    monkeypatch.setattr(judge, "last_line_verdict", lambda text: float(sum(text.encode()) % 2))
    settings = {
        "path": str(tiny_llama),
        "max_tokens": 4,
        "prompt_template": "{response}",
        "temperature": 1.0,
        "weight": 3.0,
    }
    monkeypatch.setattr(judge.LocalJudge, "_read", _read_what_is_cut)
    folder = train_run(make("run", run={"seed": 1, "total_steps": 1}, reward={"terms": [], "judge": settings}))
    [line] = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["reward/invalid_share"] == 0 and 0 < metrics["reward/term/judge"] < 1
    assert metrics["reward/mean"] == pytest.approx(3 * metrics["reward/term/judge"])
    again = train_run(make("again", run={"seed": 1, "total_steps": 1}, reward={"terms": [], "judge": settings}))
    assert json.loads((again / "metrics.jsonl").read_text())["reward/mean"] == metrics["reward/mean"]


def _read_what_is_cut(self: judge.LocalJudge, answer: Trajectory) -> Outcome:
    return Reward(self._question.verdict(answer.text))
