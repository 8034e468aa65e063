"""Metrics by the names of a dialect: every value by hand, from one step's numbers."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from posttrain.dialects.metric_names import Step, named, tracking, with_dialect_names

GLOSSARY = Path(__file__).parents[3] / "docs" / "metrics.md"

# 4 prompts x 2 samples on 2 devices: 8 responses of 25 tokens, prompts of 10: 200 response tokens, 280 in all.
METRICS = {
    "reward/mean": 0.25,
    "reward/max": 1.0,
    "reward/min": -1.0,
    "reward/kl": 0.04,
    "reward/kl_coef": 0.01,
    "reward/clip_fraction": 0.125,
    "advantage/mean": 0.1,
    "advantage/abs_mean": 0.6,
    "advantage/max": 1.5,
    "advantage/min": -1.25,
    "policy/loss": -0.3,
    "policy/pg_loss": -0.2,
    "policy/clip_fraction": 0.05,
    "policy/dual_clip_fraction": 0.02,
    "policy/ratio_mean": 1.02,
    "policy/kl_old": 0.03,
    "policy/entropy": 2.0,
    "policy/grad_norm": 0.7,
    "policy/lr": 1e-6,
    "reference/kl": 0.08,
    "critic/loss": 0.4,
    "critic/value_clip_fraction": 0.3,
    "critic/values_mean": 0.2,
    "critic/returns_mean": 0.35,
    "critic/explained_variance": 0.5,
    "critic/grad_norm": 3.0,
    "critic/lr": 1e-5,
    "response/length_mean": 25.0,
    "response/length_max": 40.0,
    "response/length_min": 5.0,
    "response/length_std": 8.0,
    "response/truncated_share": 0.25,
    "prompt/length_mean": 10.0,
    "prompt/length_max": 12.0,
    "prompt/length_min": 8.0,
    "step/sequences": 8.0,
    "step/response_tokens": 200.0,
    "progress/epoch": 1.5,
    "time/step_s": 7.0,
    "time/rollout_s": 4.0,
    "time/reward_s": 0.5,
    "time/logprobs_s": 0.6,
    "time/values_s": 0.14,
    "time/critic_update_s": 0.7,
    "time/update_s": 1.4,
    "time/validation_s": 3.0,
    "validation/openai/gsm8k/accuracy": 0.375,
    "validation/openai/gsm8k/reward_mean": 0.5,
    "validation/openai/gsm8k/invalid_share": 0.0,
    "validation/openai/gsm8k/reward_best@2": 0.75,
    "validation/openai/gsm8k/reward_best@4": 0.9,
    "validation/openai/gsm8k/reward_worst@4": 0.1,
    "validation/openai/gsm8k/reward_std@4": 0.3,
    "validation/openai/gsm8k/reward_maj@4": 0.6,
    "validation/openai/gsm8k/length_mean": 30.0,
}


def config(**changes: Any) -> dict[str, Any]:
    """The settings that the tables ask for; ``loss__kl_coef=0.1`` changes one."""
    tree: dict[str, Any] = {
        "loss": {
            "aggregation": "token_mean",
            "entropy_aggregation": "token_mean",
            "kl_aggregation": None,
            "kl_coef": 0.0,
            "entropy_coef": 0.0,
            "sft_coef": 0.0,
        },
        "reward": {"kl": {"coef": 0.0}, "clip": None, "normalize_mean": "none", "normalize_std": "none"},
        "advantage": {"whiten": False},
        "placement": {"devices": 2},
        "validation": {"samples_per_prompt": 4},
    }
    for name, value in changes.items():
        *parents, leaf = name.split("__")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return tree


def names_of(
    dialect: str, number: int = 12, metrics: dict[str, float] | None = None, **changes: Any
) -> dict[str, float]:
    table = importlib.import_module(f"posttrain.dialects.{dialect}.metrics")
    step = Step(number, METRICS if metrics is None else metrics, config(**changes))
    return named(step, table.NAMES, table.VALIDATION)


VERL = {
    "actor/entropy": 2.0,
    "actor/pg_loss": -0.2,
    "actor/pg_clipfrac": 0.05,
    "actor/pg_clipfrac_lower": 0.02,
    "actor/ppo_kl": 0.01,  # 0.03 = mean(r) - 1 - mean(log r), so -mean(log r) = 0.03 - 1.02 + 1
    "actor/kl_loss": 0.08,
    "actor/kl_coef": 0.0,
    "actor/grad_norm": 0.7,
    "actor/lr": 1e-6,
    "actor/reward_kl_penalty": 0.04,
    "actor/reward_kl_penalty_coeff": 0.01,
    "critic/score/mean": 0.25,
    "critic/score/max": 1.0,
    "critic/score/min": -1.0,
    "critic/rewards/mean": 0.25,
    "critic/rewards/max": 1.0,
    "critic/rewards/min": -1.0,
    "critic/advantages/mean": 0.1,
    "critic/advantages/max": 1.5,
    "critic/advantages/min": -1.25,
    "critic/returns/mean": 0.35,
    "critic/values/mean": 0.2,
    "critic/vf_loss": 0.4,
    "critic/vf_clipfrac": 0.3,
    "critic/vf_explained_var": 0.5,
    "response_length/mean": 25.0,
    "response_length/max": 40.0,
    "response_length/min": 5.0,
    "response_length/clip_ratio": 0.25,
    "prompt_length/mean": 10.0,
    "prompt_length/max": 12.0,
    "prompt_length/min": 8.0,
    "timing_s/step": 7.0,
    "timing_s/gen": 4.0,
    "timing_s/reward": 0.5,
    "timing_s/old_log_prob": 0.6,
    "timing_s/values": 0.14,
    "timing_s/update_critic": 0.7,
    "timing_s/update_actor": 1.4,
    "timing_s/testing": 3.0,
    "timing_per_token_ms/gen": 20.0,  # 4 s x 1000 / 200
    "timing_per_token_ms/values": 0.5,  # 0.14 s x 1000 / 280
    "timing_per_token_ms/update_critic": 2.5,  # 0.7 s x 1000 / 280
    "timing_per_token_ms/update_actor": 5.0,  # 1.4 s x 1000 / 280
    "perf/total_num_tokens": 280.0,  # 200 + 8 x 10
    "perf/time_per_step": 7.0,
    "perf/throughput": 20.0,  # 280 / 7 s / 2 devices
    "training/global_step": 12,
    "training/epoch": 1,  # in the second pass, the first being 0
    "val-core/openai/gsm8k/reward/mean@4": 0.5,
    "val-core/openai/gsm8k/reward/best@4/mean": 0.9,
    "val-core/openai/gsm8k/reward/maj@4/mean": 0.6,
    "val-aux/openai/gsm8k/reward/best@2/mean": 0.75,
    "val-aux/openai/gsm8k/reward/worst@4/mean": 0.1,
    "val-aux/openai/gsm8k/reward/std@4": 0.3,
}
SKYRL = {
    "reward/avg_raw_reward": 0.25,
    "generate/avg_num_tokens": 25.0,
    "generate/max_num_tokens": 40.0,
    "generate/min_num_tokens": 5.0,
    "generate/std_num_tokens": 8.0,
    "loss/avg_raw_rewards": 0.25,
    "loss/avg_final_rewards": 0.25,
    "loss/avg_raw_advantages": 0.1,
    "loss/avg_raw_advantages_abs": 0.6,
    "loss/avg_kl": 0.04,
    "policy/policy_loss": -0.2,
    "policy/final_loss": -0.3,
    "policy/policy_lr": 1e-6,
    "policy/ppo_clip_ratio": 0.05,
    "policy/policy_entropy": 2.0,
    "policy/policy_kl": 0.08,
    "policy/raw_grad_norm": 0.7,
    "critic/critic_loss": 0.4,
    "critic/critic_lr": 1e-5,
    "critic/raw_grad_norm": 3.0,
    "critic/values_clipfrac": 0.3,
    "trainer/epoch": 1,
    "trainer/global_step": 12,
    "timing/step": 7.0,
    "timing/generate": 4.0,
    "timing/policy_train": 1.4,
    "timing/critic_train": 0.7,
    "timing/eval": 3.0,
    "eval/openai_gsm8k/avg_score": 0.5,
    "eval/all/avg_score": 0.5,
}
ROLL = {
    "critic/score/mean": 0.25,
    "critic/score/max": 1.0,
    "critic/score/min": -1.0,
    "critic/rewards/mean": 0.25,
    "critic/rewards/max": 1.0,
    "critic/rewards/min": -1.0,
    "critic/advantages/mean": 0.1,
    "critic/advantages/max": 1.5,
    "critic/advantages/min": -1.25,
    "critic/returns/mean": 0.35,
    "critic/values/mean": 0.2,
    "critic/entropy/mean": 2.0,
    "critic/kl": 0.04,
    "critic/kl_coef": 0.01,
    "critic/reward_clip_frac": 0.125,
    "critic/clipfrac": 0.3,
    "actor/pg_loss": -0.2,
    "actor/total_loss": -0.3,
    "actor/kl_loss": 0.08,
    "actor/clipfrac": 0.05,
    "actor/ratio_mean": 1.02,
    "actor/lr": 1e-6,
    "actor_train/grad_norm": 0.7,
    "token/response_length/mean": 25.0,
    "token/response_length/max": 40.0,
    "token/response_length/min": 5.0,
    "token/prompt_length/mean": 10.0,
    "token/prompt_length/max": 12.0,
    "token/prompt_length/min": 8.0,
    "time/step_generate": 4.0,
    "time/step_train": 1.4,
    "time/val_step": 3.0,
    "system/global_step": 11,  # ROLL's first step is 0
    "system/batch_size": 8.0,
    "system/samples": 96.0,  # 12 x 8
    "val_correct/openai/gsm8k/mean": 0.375,
    "val_correct/all/mean": 0.375,
}


@pytest.mark.parametrize(("dialect", "expected"), [("verl", VERL), ("skyrl", SKYRL), ("roll", ROLL)])
def test_every_name_has_its_value(dialect: str, expected: dict[str, float]) -> None:
    assert names_of(dialect) == pytest.approx(expected)


def test_names_of_roll_s_dpo_pipeline() -> None:
    step = {"policy/loss": 0.6, "rewards/chosen": 0.3, "rewards/rejected": -0.1, "rewards/margins": 0.4}
    step |= {"rewards/accuracies": 0.75, "time/update_s": 2.0, "time/reference_s": 1.0, "validation/accuracy": 0.5}
    assert (
        names_of("roll", metrics=step).items()
        >= {
            "actor/loss": 0.6,
            "actor/acc": 0.75,
            "actor/chosen_reward": 0.3,
            "actor/reject_reward": -0.1,
            "time/actor_train": 2.0,
            "time/cal_ref_log_probs": 1.0,
            "val/actor/acc": 0.5,
        }.items()
    )


# What the settings of a run make impossible to know is absent, and nothing else is.
GONE = [
    ("verl", {"reward__kl__coef": 0.1}, "critic/rewards/(mean|max|min)|timing_s/old_log_prob"),
    ("verl", {"loss__aggregation": "sequence_mean_token_mean"}, "actor/kl_loss"),
    ("verl", {"loss__aggregation": "sequence_mean_token_mean", "loss__kl_aggregation": "token_mean"}, ""),
    ("verl", {"loss__entropy_aggregation": "sequence_mean_token_mean"}, "actor/entropy"),
    ("skyrl", {"advantage__whiten": True}, "loss/avg_raw_advantages(_abs)?"),
    ("skyrl", {"reward__kl__coef": 0.1}, "loss/avg_(raw|final)_rewards"),
    ("roll", {"reward__normalize_std": "group"}, "critic/rewards/(mean|max|min)"),
    ("roll", {"reward__clip": 5.0}, "critic/rewards/(mean|max|min)"),
]


@pytest.mark.parametrize(("dialect", "changes", "gone"), GONE)
def test_a_definition_that_cannot_be_met_is_left_out(dialect: str, changes: dict[str, Any], gone: str) -> None:
    every, found = names_of(dialect), names_of(dialect, **changes)
    assert {name for name in every if name not in found} == {name for name in every if re.fullmatch(gone, name)}


def test_the_policy_loss_of_its_own() -> None:
    """With means over tokens it is logged; else the whole objective is it, where that has no other part."""
    other = {"loss__aggregation": "sequence_mean_token_mean"}
    assert names_of("verl", **other)["actor/pg_loss"] == -0.3
    assert "actor/pg_loss" not in names_of("verl", **other, loss__kl_coef=0.1)
    assert names_of("verl", loss__kl_coef=0.1)["actor/pg_loss"] == -0.2
    assert names_of("verl", loss__kl_coef=0.1)["actor/kl_coef"] == 0.1


def test_the_epoch_of_the_last_step_of_a_pass() -> None:
    assert [names_of("verl", metrics={"progress/epoch": drawn})["training/epoch"] for drawn in (0.2, 1.0, 1.1)] == [
        0,
        0,
        1,
    ]


def test_a_validation_with_invalid_rewards_or_several_sources() -> None:
    """verl's mean counts every response, and SkyRL's eval/all is a mean over responses: neither can be had then."""
    metrics = {"validation/a/reward_mean": 0.5, "validation/a/invalid_share": 0.5, "validation/b/reward_mean": 1.0}
    metrics["validation/b/invalid_share"] = 0.0
    assert names_of("verl", 3, metrics) == {"training/global_step": 3, "val-core/b/reward/mean@4": 1.0}
    scores = {name: value for name, value in names_of("skyrl", 3, metrics).items() if name.startswith("eval/")}
    assert scores == {"eval/a/avg_score": 0.5, "eval/b/avg_score": 1.0}


def test_one_name_for_two_things_stays_ours() -> None:
    """ROLL has a critic/loss as well; ours is told under it."""
    sent = with_dialect_names(12, METRICS, config(), "roll")
    assert {name: sent[name] for name in METRICS} == METRICS
    assert with_dialect_names(12, METRICS, config(), None) == METRICS


def test_names_are_asked_for_with_services_only() -> None:
    assert tracking(["console"], "verl") == {"tracking.trackers": ["console"]}
    assert tracking(["console", "wandb", "console"], "skyrl") == {
        "tracking.trackers": ["console", "wandb"],
        "tracking.dialect_names": "skyrl",
    }


def test_the_tables_read_metrics_that_there_are() -> None:
    documented = set(re.findall(r"^\| `([^`]+)` \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE))
    assert {name for name in METRICS if not name.startswith("validation/")} - documented == set()
