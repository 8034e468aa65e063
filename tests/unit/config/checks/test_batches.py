"""Budgets of tokens: what is refused before anything starts, and what is told to have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.config.roles import chooses_before
from posttrain.plan.checks.train import check, warnings_of

SIZES: dict[str, Any] = {
    "data": {"train_files": ["x"], "prompts_per_step": 4, "max_prompt_tokens": 100},
    "rollout": {"samples_per_prompt": 4, "max_response_tokens": 50},
}


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "x"}, **SIZES, **sections})


@pytest.mark.parametrize(
    ("role", "needs"),
    [
        ("policy", {}),
        ("reference", {"loss": {"kl_coef": 0.1}}),
        ("reference", {"reward": {"kl": {"coef": 0.1}}}),
        ("critic", {"advantage": {"name": "gae"}}),
    ],
)
def test_budget_below_the_longest_sequence_is_refused(role: str, needs: dict[str, Any]) -> None:
    (problem,) = check(config(**needs, **{role: {"max_tokens_per_micro_batch": 149}}))
    assert problem.field == f"{role}.max_tokens_per_micro_batch"
    assert str(problem) == (
        f"a prompt and its response may have 100 + 50 = 150 tokens, and {role}.max_tokens_per_micro_batch is 149; "
        f"use {role}.max_tokens_per_micro_batch=150 or more, or lower data.max_prompt_tokens or rollout.max_response_tokens"
    )
    assert check(config(**needs, **{role: {"max_tokens_per_micro_batch": 150}})) == []


def test_old_logprobs_are_cut_by_the_references_budget() -> None:
    asked: dict[str, Any] = {"reference": {"max_tokens_per_micro_batch": 149}}
    (warning,) = warnings_of(config(**asked))  # one update per step: there is nothing to score
    assert warning.startswith("reference.max_tokens_per_micro_batch has no effect: this run computes no log-probs")
    assert check(config(**asked)) == []
    for several in ({"sequences_per_mini_batch": 8}, {"epochs_per_step": 2}):
        assert len(check(config(**asked, policy=several))) == 1
        assert warnings_of(config(**asked, policy=several)) == []


def test_full_kl_scores_no_reference_by_itself() -> None:
    """The reference reads what the policy reads, in the policy's micro-batches."""
    loss = {"kl_coef": 0.1, "kl_estimator": "full"}
    (warning,) = warnings_of(config(loss=loss, reference={"max_tokens_per_micro_batch": 149}))
    assert warning.startswith("reference.max_tokens_per_micro_batch has no effect")


def test_count_beside_a_budget_has_no_effect() -> None:
    policy = {"max_tokens_per_micro_batch": 500, "sequences_per_micro_batch_per_device": 4}
    assert warnings_of(config(policy=policy)) == [
        "policy.sequences_per_micro_batch_per_device has no effect: policy.max_tokens_per_micro_batch is given, and "
        "micro-batches are cut by tokens"
    ]
    assert warnings_of(config(policy={"max_tokens_per_micro_batch": 500})) == []


def test_losses_that_choose_in_the_mini_batch_choose_before_the_update_unless_it_comes_in_one_piece() -> None:
    """16 sequences of up to 150 tokens: 2,400."""

    def pieces(loss: str = "clip_cov", **policy: int) -> bool:
        made = config(loss={"name": loss}, policy=policy)
        assert check(made) == []
        return chooses_before(made)

    assert pieces(max_tokens_per_micro_batch=2399) and not pieces(max_tokens_per_micro_batch=2400)
    assert pieces(sequences_per_micro_batch_per_device=15) and not pieces(sequences_per_micro_batch_per_device=16)
    assert not pieces("ppo_clip", sequences_per_micro_batch_per_device=1)
