"""Rules about precision, adapters, optimizers and schedules: what is refused, and what has no effect."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.config.checks.training import training_problems
from posttrain.plan.checks.train import check, warnings_of


def config(**sections: dict[str, Any]) -> RunConfig:
    plain: dict[str, Any] = {"data": {"train_files": ["a"]}, "reward": {"terms": [{"name": "exact_match"}]}}
    return RunConfig.model_validate(plain | {"model": {"path": "m", **sections.pop("model", {})}} | sections)


def test_the_defaults_are_right_and_have_an_effect() -> None:
    assert check(config()) == []
    assert [text for text in warnings_of(config()) if "schedule" in text or "optimizer" in text] == []


@pytest.mark.parametrize(
    ("sections", "field", "words"),
    [
        (
            {"model": {"compute_dtype": "float32", "master_dtype": "bfloat16"}},
            "model.master_dtype",
            "would round what it has computed",
        ),
        (
            {"policy": {"schedule": {"warmup_updates": 20, "decay_updates": 20}}},
            "policy.schedule.decay_updates",
            "reaches its floor at update 20, and warms up until update 20",
        ),
        (
            {"critic": {"schedule": {"warmup_updates": 5, "decay_updates": 3}}},
            "critic.schedule.decay_updates",
            "reaches its floor at update 3",
        ),
    ],
)
def test_what_cannot_be_run(sections: dict[str, Any], field: str, words: str) -> None:
    [problem] = training_problems(config(**sections))
    assert problem.field == field and words in problem.what and problem.fix
    assert problem in check(config(**sections))


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"policy": {"schedule": {"min_lr_ratio": 0.1}}},
            "policy.schedule.min_lr_ratio has no effect: the schedule is constant (cosine, linear, warmup_stable_decay, "
            "inverse_square_root would read it)",
        ),
        (
            {"policy": {"schedule": {"name": "linear", "cycles": 1.0}}},
            "policy.schedule.cycles has no effect: the schedule is linear (cosine would read it)",
        ),
        (
            {"policy": {"schedule": {"name": "cosine", "decay": "linear"}}},
            "policy.schedule.decay has no effect: the schedule is cosine (warmup_stable_decay would read it)",
        ),
        (
            {"policy": {"schedule": {"warmup_updates": 3, "warmup_ratio": 0.1}}},
            "policy.schedule.warmup_ratio has no effect: policy.schedule.warmup_updates is given",
        ),
        (
            {"policy": {"schedule": {"warmup_updates": 3, "warmup_rounding": "up"}}},
            "policy.schedule.warmup_rounding has no effect: no warmup_ratio is rounded",
        ),
        (
            {"policy": {"schedule": {"moves_every": "step"}}},
            "policy.schedule.moves_every has no effect: the learning rate does not move",
        ),
        (
            {"policy": {"schedule": {"warmup_start_ratio": 0.1}}},
            "policy.schedule.warmup_start_ratio has no effect: there is no warm-up",
        ),
        (
            {"policy": {"optimizer": {"weight_decay_shape": "cosine"}}},
            "policy.optimizer.weight_decay_shape has no effect: policy.optimizer.weight_decay_end is null",
        ),
        (
            {"policy": {"lora": {"adapter_path": "here", "rank": 4}}},
            "policy.lora.rank: no effect, because those of the adapter in here count",
        ),
        (
            {"reference": {"offload": True}, "policy": {"lora": {}}, "loss": {"kl_coef": 0.1}},
            "reference.offload has no effect: the reference is the policy without its adapter",
        ),
        (
            {"reference": {"offload": True}, "loss": {"kl_coef": 0.1, "kl_estimator": "full"}},
            "reference.offload has no effect: loss.kl_estimator=full needs the reference in every micro-batch",
        ),
        (
            {"model": {"padded": True}, "policy": {"share_prompts": False}},
            "policy.share_prompts has no effect: model.padded gives every sequence its own prompt",
        ),
    ],
)
def test_what_has_no_effect_is_told(sections: dict[str, Any], text: str) -> None:
    assert text in warnings_of(config(**sections))
    assert text not in warnings_of(config())


def test_a_critic_that_is_not_there_is_told_about_once() -> None:
    told = [
        text for text in warnings_of(config(critic={"schedule": {"cycles": 2.0}})) if "critic.schedule.cycles" in text
    ]
    assert len(told) == 1 and "grpo needs no critic" in told[0]
