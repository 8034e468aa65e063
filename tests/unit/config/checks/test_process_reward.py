"""Rules between the process reward model and the other keys of a run."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.config.checks import evaluate
from posttrain.config.evaluate import EvaluateConfig
from posttrain.plan.checks.train import check

PRIME: dict[str, Any] = {"advantage": {"name": "prime"}, "reward": {"process": {}}}


def fields(**sections: Any) -> list[str]:
    base = {"model": {"path": "m"}, "data": {"train_files": ["t.jsonl"]}}
    return [problem.field for problem in check(RunConfig.model_validate(base | sections))]


def test_prime_and_its_model_go_together() -> None:
    assert fields(**PRIME) == []
    assert fields(advantage={"name": "prime"}) == ["advantage.name"]
    assert fields(reward={"process": {}}) == ["advantage.name"]


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"rollout": {"samples_per_prompt": 1}}, "rollout.samples_per_prompt"),
        ({"placement": {"devices": 2}, "policy": {"engine": "fsdp"}}, "reward.process"),
        ({"placement": {"runtime": "ray"}}, "reward.process"),
        ({"policy": {"engine": "fsdp"}}, "policy.engine"),
        ({"environment": {"name": "guess_number"}}, "reward.process"),
        ({"asynchronous": {"mode": "one_step"}}, "asynchronous.mode"),
        ({"resampling": {"weights": "power"}}, "resampling.weights"),
    ],
)
def test_a_run_in_which_it_cannot_learn_is_refused(sections: dict[str, Any], field: str) -> None:
    assert field in fields(**PRIME, **sections)


def test_an_evaluation_says_that_it_trains_no_process_reward_model() -> None:
    config = EvaluateConfig.model_validate(
        {"data": {"files": ["a.parquet"]}, "output": {"folder": "o"}, "reward": {"process": {"log_ratio_scale": 0.1}}}
    )
    [said] = evaluate.warnings_of(config)
    assert said.startswith("reward.process has no effect: it shapes the rewards of training")
