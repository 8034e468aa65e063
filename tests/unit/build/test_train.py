"""The choices that building a run makes, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.build.train import run_plan
from posttrain.config import RunConfig
from posttrain.config.roles import reads_references
from posttrain.plan.batch import plan_batches

TWO_MINI_BATCHES = {"policy": {"sequences_per_mini_batch": 32}}  # of the 8 x 8 sequences of a step
TWO_EPOCHS = {"policy": {"epochs_per_step": 2}}
SAMPLERS = {"loss": {"rollout_correction": {"use_rollout_logprobs": True}}}


def is_on_policy(sections: dict[str, Any]) -> bool:
    """True: the update reads the log-probs that it has anyway, and no pass computes old ones before it."""
    config = RunConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": ["x"]}} | sections)
    batches, problems = plan_batches(config, training_prompts=100)
    assert batches is not None and problems == []
    assert batches.updates_per_step == (2 if "policy" in sections else 1)
    return run_plan(config, batches, []).step.update.on_policy


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, True),
        (TWO_MINI_BATCHES, False),
        (TWO_EPOCHS, False),
        # the ratio is taken to the sampler's log-probs: nothing has to be computed, however many updates there are
        (SAMPLERS, True),
        (TWO_MINI_BATCHES | SAMPLERS, True),
        (TWO_EPOCHS | SAMPLERS, True),
        # something reads old log-probs before the first update
        ({"loss": {"rollout_correction": {"weights": "token"}}}, False),
        ({"loss": {"rollout_correction": {"reject": ["token_k1"], "reject_bounds": ["2"]}}}, False),
        ({"advantage": {"name": "optimal_token_baseline"}}, False),
        ({"reward": {"kl": {"coef": 0.1}}}, False),
        (TWO_MINI_BATCHES | SAMPLERS | {"reward": {"kl": {"coef": 0.1}}}, False),
    ],
)
def test_old_logprobs_are_computed_only_where_something_reads_them(sections: dict[str, Any], expected: bool) -> None:
    assert is_on_policy(sections) is expected


@pytest.mark.parametrize(("by_name", "parts"), [(True, {"ice": 0, "store": 1}), (False, {})])
def test_statistics_of_a_step_are_over_each_environment_on_request(by_name: bool, parts: dict[str, int]) -> None:
    named = {"ice": {"name": "frozen_lake"}, "store": {"name": "sokoban"}}
    environment = {"named": named, "train_episodes": 100, "statistics_by_name": by_name}
    sections = {"model": {"path": "x"}, "data": {"train_files": []}, "environment": environment}
    config = RunConfig.model_validate(sections)
    batches, _ = plan_batches(config, training_prompts=100)
    assert batches is not None and run_plan(config, batches, []).step.parts == parts


TEACHER = {"teachers": {"big": {"path": "x"}}}
JUDGE = {"path": "x", "prompt_template": "Is this polite? {response}"}


@pytest.mark.parametrize(
    ("sections", "needed"),
    [
        ({}, True),
        ({"distillation": TEACHER}, False),
        ({"distillation": TEACHER | {"with_rewards": True}}, True),
        ({"reward": {"terms": [], "model": {"path": "x"}}}, False),
        ({"reward": {"terms": [], "judge": {"path": "x"}}}, True),  # the usual question shows the reference
        ({"reward": {"terms": [], "judge": JUDGE}}, False),
        ({"distillation": TEACHER, "environment": {"name": "search"}}, True),
    ],
)
def test_reference_answers_are_needed_where_something_learned_from_reads_them(sections: Any, needed: bool) -> None:
    assert reads_references(RunConfig.model_validate({"model": {"path": "x"}, "data": {}} | sections)) is needed


@pytest.mark.parametrize(("with_rewards", "share"), [(True, 0.5), (False, 1.0)])
def test_rewards_that_are_only_measured_stop_no_run(with_rewards: bool, share: float) -> None:
    sections = {"model": {"path": "x"}, "data": {"train_files": ["x"]}}
    sections |= {"distillation": TEACHER | {"with_rewards": with_rewards}}
    config = RunConfig.model_validate(sections)
    batches, _ = plan_batches(config, training_prompts=100)
    assert batches is not None and run_plan(config, batches, []).step.max_invalid_share == share
