"""What is made of the scores, in which order, and what a run remembers of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from batches import advantages_of, scored_batch, sequence_batch
from posttrain.records.batches import ScoredBatch, ShapedBatch, TrainerLogprobs
from posttrain.records.plans import AdvantagePlan, KlRewardPlan, RewardPlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import (
    Invalid,
    Outcome,
    Reward,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from posttrain.steps.advantage import estimate_advantages
from posttrain.steps.assemble import assemble
from posttrain.steps.score import score
from posttrain.steps.shape_rewards import RewardState, shape_outcomes, shape_rewards


def scored(*responses: tuple[int, StopReason, Outcome]) -> ScoredGroup:
    """A group of responses: tokens, why they ended, outcome."""
    trajectories = tuple(
        Trajectory(
            sample_id=f"p/{number}",
            token_ids=(5,) * tokens,
            logprobs=(-1.0,) * tokens,
            text="",
            stop_reason=reason,
            policy_version=0,
        )
        for number, (tokens, reason, _) in enumerate(responses)
    )
    prompt = Prompt(prompt_id="p", token_ids=(1,), text="", data_source="t")
    return ScoredGroup(
        group=TrajectoryGroup(prompt=prompt, trajectories=trajectories), outcomes=tuple(o for *_, o in responses)
    )


def batch_of(rewards: list[float], groups: list[int], valid: list[bool] | None = None) -> ScoredBatch:
    """Rows of two sampled tokens."""
    rows = len(rewards)
    sequences = sequence_batch(
        tokens=torch.zeros(rows, 3, dtype=torch.int64),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        response_mask=torch.ones(rows, 2, dtype=torch.bool),
        group_index=torch.tensor(groups),
    )
    return scored_batch(sequences, rewards=torch.tensor(rewards), valid=torch.tensor(valid or [True] * rows))


def shaped_by(batch: ScoredBatch, plan: RewardPlan, state: RewardState) -> ShapedBatch:
    """Old log-probs are -1 and -1, the reference's -1.5 and -2: k1 is 0.5 and 1."""
    rows = len(batch.rewards)
    logprobs = TrainerLogprobs(old=torch.full((rows, 2), -1.0), ref=torch.tensor([[-1.5, -2.0]] * rows))
    return shape_rewards(batch, logprobs, plan, state)


EOS, LENGTH = StopReason.EOS, StopReason.LENGTH


def test_overlong_penalty_is_taken_from_the_reward_and_kept_beside_the_terms() -> None:
    # Limit 8, buffer 4: six tokens are 2 / 4 into it.
    plan = RewardPlan(max_response_tokens=8, overlong_buffer_tokens=4, overlong_penalty=1.0)
    group = scored((4, EOS, Reward(1.0, (("a", 1.0),))), (6, EOS, Reward(1.0)), (8, LENGTH, Invalid("exception")))
    (shaped,) = shape_outcomes([group], plan)
    assert shaped.outcomes == (
        Reward(1.0, (("a", 1.0), ("overlong", 0.0))),
        Reward(0.5, (("overlong", -0.5),)),
        Invalid("exception"),
    )


def test_what_did_not_end_by_itself_is_0_after_every_other_rule() -> None:
    plan = RewardPlan(max_response_tokens=8, overlong_buffer_tokens=4, zero_unless_stopped=True)
    group = scored((8, LENGTH, Reward(3.0)), (6, StopReason.STOP_TEXT, Reward(3.0)), (6, EOS, Reward(3.0)))
    (shaped,) = shape_outcomes([group], plan)
    assert [outcome.value for outcome in shaped.outcomes if isinstance(outcome, Reward)] == [0.0, 2.5, 2.5]


def test_without_a_rule_nothing_changes() -> None:
    group = scored((8, LENGTH, Reward(3.0)))
    assert shape_outcomes([group], RewardPlan(max_response_tokens=8)) == [group]
    state = RewardState(KlRewardPlan(coef=0.0))
    batch = batch_of([1.0, 2.0], [0, 0])
    shaped = shaped_by(batch, RewardPlan(), state)
    assert shaped.rewards.tolist() == [1.0, 2.0] and shaped.token_rewards is None and state.metrics == {}


def test_normalised_first_then_clipped() -> None:
    # Mean 2, deviations -2, -1, 3; clipped to 2 either side.
    state = RewardState(KlRewardPlan(coef=0.0))
    shaped = shaped_by(batch_of([0.0, 1.0, 5.0], [0, 0, 0]), RewardPlan(normalize_mean="batch", clip=1.5), state)
    assert shaped.rewards.tolist() == [-1.5, -1.0, 1.5]
    assert state.metrics == {"reward/clip_fraction": pytest.approx(2 / 3)}


def test_running_moments_take_the_step_in_first_and_remember() -> None:
    state = RewardState(KlRewardPlan(coef=0.0))
    plan = RewardPlan(normalize_mean="running")
    first = shaped_by(batch_of([0.0, 2.0, 9.0], [0, 0, 0], [True, True, False]), plan, state)
    assert first.rewards.tolist() == [-1.0, 1.0, 0.0]  # mean of 0 and 2; the third has no valid reward
    second = shaped_by(batch_of([4.0, 6.0], [0, 0]), plan, state)
    assert second.rewards.tolist() == [1.0, 3.0]  # mean of 0, 2, 4, 6 is 3
    assert state.metrics["reward/running_mean"] == 3.0


def test_kl_is_taken_from_every_token_and_from_the_whole_reward() -> None:
    state = RewardState(KlRewardPlan(coef=0.1))
    plan = RewardPlan(clip=1.0, kl=KlRewardPlan(coef=0.1))
    shaped = shaped_by(batch_of([3.0, 0.0], [0, 0], [True, False]), plan, state)
    # Clipped to 1 on the last token first; then 0.1 x 0.5 and 0.1 x 1. The invalid response has no part.
    assert shaped.token_rewards is not None
    torch.testing.assert_close(shaped.token_rewards, torch.tensor([[-0.05, 0.9], [0.0, 0.0]]))
    torch.testing.assert_close(shaped.rewards, torch.tensor([0.85, 0.0]))
    assert state.metrics["reward/kl"] == pytest.approx(0.75)  # (0.5 + 1) / 2
    assert (state.metrics["reward/kl_coef"], state.kl_coef) == (0.1, 0.1)  # no target: it stays
    train = estimate_advantages(shaped, None, AdvantagePlan(name="reinforce_plus_plus"))
    assert train.loss_mask.tolist() == [[True, True], [False, False]]


def test_coefficient_is_steered_after_it_was_used_and_saved_exactly() -> None:
    kl = KlRewardPlan(coef=0.1, target=0.5, horizon_sequences=10)
    state, plan = RewardState(kl), RewardPlan(normalize_std="running", kl=kl)
    shaped_by(batch_of([1.0, 0.3], [0, 0]), plan, state)
    # KL 0.75 against 0.5: error 0.5, clipped to 0.2; 2 sequences of 10: x (1 + 0.04).
    assert state.metrics["reward/kl_coef"] == 0.1
    assert state.kl_coef == pytest.approx(0.104)
    resumed = RewardState(kl)
    resumed.restore(json.loads(json.dumps(state.state())))
    assert resumed.state() == state.state()
    changed = RewardState(replace(kl, coef=0.2))
    changed.restore(state.state())
    assert changed.kl_coef == 0.2  # what was steered from another start says nothing
    fixed = RewardState(replace(kl, target=None))
    fixed.restore(state.state())
    assert fixed.kl_coef == 0.1
    assert fixed.moments == state.moments


def test_rewards_of_tokens_are_cut_after_the_kl() -> None:
    """k1 = -1 - (-4) = 3 on the first token, x 1: 0 - 3, cut to -2; 1 - 0.5 on the last: 0.5. The response has -1.5."""
    kl = KlRewardPlan(coef=1.0)
    logprobs = TrainerLogprobs(old=torch.full((1, 2), -1.0), ref=torch.tensor([[-4.0, -1.5]]))
    plan = RewardPlan(kl=kl, clip_tokens=2.0)
    shaped = shape_rewards(batch_of([1.0], [0]), logprobs, plan, RewardState(kl))
    assert shaped.token_rewards is not None
    assert shaped.token_rewards.tolist() == [pytest.approx([-2.0, 0.5])]
    assert shaped.rewards.tolist() == pytest.approx([-1.5])
    uncut = shape_rewards(batch_of([1.0], [0]), logprobs, replace(plan, clip_tokens=None), RewardState(kl))
    assert uncut.rewards.tolist() == pytest.approx([-2.5])


def test_the_kl_over_the_vocabulary_is_taken_as_it_was_computed() -> None:
    scored = batch_of([2.0, 1.0], [0, 0])
    mask = scored.sequences.response_mask
    kl = torch.where(mask, 0.5, torch.nan)
    plan = RewardPlan(kl=KlRewardPlan(coef=0.1, estimator="full"))
    shaped = shape_rewards(scored, TrainerLogprobs(full_kl=kl), plan, RewardState(plan.kl))
    assert shaped.rewards.tolist() == pytest.approx(
        [reward - 0.05 * int(tokens) for reward, tokens in zip([2.0, 1.0], mask.sum(dim=1), strict=True)]
    )


def test_kl_that_is_not_finite_does_not_reach_the_coefficient() -> None:
    kl = KlRewardPlan(coef=0.1, target=0.5)
    state = RewardState(kl)
    logprobs = TrainerLogprobs(old=torch.full((1, 2), -1.0), ref=torch.tensor([[float("nan"), -1.0]]))
    shape_rewards(batch_of([1.0], [0]), logprobs, RewardPlan(kl=kl), state)
    assert state.kl_coef == 0.1


# --------------------------------------------------------------------- around the estimator, and what leaves the loss


def test_truncated_responses_leave_the_loss_but_stay_in_the_baseline() -> None:
    group = scored((2, EOS, Reward(1.0)), (3, LENGTH, Reward(0.0)))
    train = advantages_of(assemble([group], mask_truncated=True), AdvantagePlan(name="grpo"))
    assert train.loss_mask.tolist() == [[True, True, False], [False, False, False]]
    assert train.advantages[0, 0].item() == pytest.approx(0.70711, abs=1e-4)  # (1 - 1/2) / sqrt(1/2)
    assert train.counts().sequences == 1
    both = advantages_of(assemble([group]), AdvantagePlan(name="grpo"))
    assert both.loss_mask.sum().item() == 5


def test_group_that_was_not_kept_has_no_part_in_the_loss() -> None:
    group = replace(scored((2, EOS, Reward(1.0)), (2, EOS, Reward(0.0))), kept=False)
    assert not advantages_of(assemble([group]), AdvantagePlan(name="grpo")).loss_mask.any()


def test_advantages_are_whitened_over_loss_tokens_and_then_clipped() -> None:
    # Dr. GRPO: advantages +-1 on 1 + 3 tokens of the loss; the truncated third response is in the mean 1 alone.
    group = scored((1, EOS, Reward(2.0)), (3, EOS, Reward(0.0)), (3, LENGTH, Reward(1.0)))
    plan = AdvantagePlan(name="grpo", parameters={"normalize_by_std": False}, whiten=True)
    batch = assemble([group], mask_truncated=True)
    train = advantages_of(batch, plan)
    # Values 1, -1, -1, -1: mean -1/2, squares 9/4 + 3/4 = 3, over 3: 1. So 3/2 and -1/2.
    assert train.advantages[:, 0].tolist() == pytest.approx([1.5, -0.5, 0.0])
    clipped = advantages_of(batch, replace(plan, clip=1.0))
    assert clipped.advantages[:, 0].tolist() == pytest.approx([1.0, -0.5, 0.0])


def test_token_rewards_are_whitened_before_the_estimator() -> None:
    # Tokens 0, 1, 0, 0: mean 1/4, squares 3 x 1/16 + 9/16 = 3/4, over 3: 1/4, std 1/2. So 3/2 and -1/2.
    batch = batch_of([1.0, 0.0], [0, 0])
    plain = advantages_of(batch, AdvantagePlan(name="reinforce_plus_plus"))
    plan = AdvantagePlan(name="reinforce_plus_plus", whiten_rewards=True)
    whitened = advantages_of(batch, plan)
    # Returns 1, 1.5 and -1, -0.5 against 1, 1 and 0, 0; the estimator then whitens these.
    returns = torch.tensor([[1.0, 1.5], [-1.0, -0.5]])
    expected = (returns - 0.25) / returns.std()
    torch.testing.assert_close(whitened.advantages, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain.advantages, whitened.advantages)


# -------------------------------------------------------------------------------------------- terms and a reward model


class Fixed:
    """A scorer, or a reward model, of prepared outcomes."""

    def __init__(self, outcomes: tuple[Outcome, ...]) -> None:
        self.outcomes = outcomes

    def score(self, groups: list[object]) -> list[tuple[Outcome, ...]]:
        return [self.outcomes for _ in groups]


def test_score_of_the_reward_model_is_added_to_the_terms() -> None:
    group = scored(*((1, EOS, Reward(0.0)) for _ in range(5))).group
    terms: tuple[Outcome, ...] = (
        Reward(1.0, (("a", 1.0),)),
        Invalid("exception", "a: x"),
        Reward(1.0),
        Reward(0.0),
        Reward(3e38),
    )
    model: tuple[Outcome, ...] = (
        Reward(0.5),
        Reward(9.0),
        Invalid("not_finite", "model: scored nan"),
        Reward(-2.0),
        Reward(3e38),
    )
    (result,) = score([group], Fixed(terms), 1.0, reward_model=Fixed(model), model_weight=2.0)  # type: ignore[arg-type]
    assert result.outcomes[:4] == (
        Reward(2.0, (("a", 1.0), ("model", 0.5))),
        Invalid("exception", "a: x"),
        Invalid("not_finite", "model: scored nan"),
        Reward(-4.0, (("model", -2.0),)),
    )
    overflow = result.outcomes[4]
    assert isinstance(overflow, Invalid) and overflow.reason == "not_finite"
