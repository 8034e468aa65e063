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
        ({"environment": {"name": "guess_number"}}, "reward.process"),
        ({"asynchronous": {"mode": "one_step"}}, "asynchronous.mode"),
        ({"resampling": {"weights": "power"}}, "resampling.weights"),
    ],
)
def test_a_run_in_which_it_cannot_learn_is_refused(sections: dict[str, Any], field: str) -> None:
    assert field in fields(**PRIME, **sections)


def test_it_is_trained_by_the_policys_engine() -> None:
    """Whose options are the policy's, but for its own."""
    on = {"placement": {"devices": 4}, "policy": {"engine": "fsdp", "engine_options": {"forward_prefetch": True}}}
    assert fields(**PRIME, **on) == []
    own = {"process": {"engine_options": {"fsdp_size": 3}, "optimizer": {"name": "muon"}}}
    assert fields(advantage={"name": "prime"}, reward=own, **on) == ["reward.process.engine_options.fsdp_size"]
    split = {"placement": {"devices": 4}, "policy": {"engine": "megatron", "tensor_parallel": 2}}
    muon = {"process": {"optimizer": {"name": "muon"}}}
    assert "reward.process.optimizer.name" in fields(advantage={"name": "prime"}, reward=muon, **split)


def test_an_evaluation_says_that_it_trains_no_process_reward_model() -> None:
    config = EvaluateConfig.model_validate(
        {"data": {"files": ["a.parquet"]}, "output": {"folder": "o"}, "reward": {"process": {"log_ratio_scale": 0.1}}}
    )
    [said] = evaluate.warnings_of(config)
    assert said.startswith("reward.process has no effect: it shapes the rewards of training")
