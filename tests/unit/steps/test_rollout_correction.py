"""A step whose sampler and trainer disagree, from log-probs to the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import scored_batch, sequence_batch, shaped_batch, train_batch
from posttrain.algos.objective import policy_objective
from posttrain.config.rejection import rejection_rules
from posttrain.records.batches import ScoredBatch, SequenceBatch, TrainBatch, TrainerLogprobs
from posttrain.records.plans import AdvantagePlan, LossPlan, RolloutCorrectionPlan, StepPlan, UpdatePlan
from posttrain.records.trajectories import SamplingParams
from posttrain.steps.advantage import estimate_advantages
from posttrain.steps.extras import add_sum_pi_squared
from posttrain.steps.measure import correction_metrics, gap_metrics
from posttrain.steps.rl_step import trainer_logprobs

LOSS = LossPlan(
    name="ppo_clip",
    parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    aggregation="token_mean",
    temperature=0.7,
)
# trainer / sampler, token by token: 2, 1 | 1, 4 | 1, (no token)
RATIOS = torch.tensor([[2.0, 1.0], [1.0, 4.0], [1.0, 1.0]])


class Policy:
    """Scores every token so that RATIOS are the ratios."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        self.calls.append(f"logprobs {temperature}")
        return torch.where(batch.response_mask, RATIOS.log() - 1, 0.0)

    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        self.calls.append(f"sum_pi_squared {temperature}")
        return torch.where(batch.response_mask, 0.5, 0.0)


def sequences() -> SequenceBatch:
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    return sequence_batch(
        tokens=torch.zeros(3, 3, dtype=torch.int64),
        prompt_lengths=torch.ones(3, dtype=torch.int64),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -1.0, 0.0),
        group_index=torch.zeros(3, dtype=torch.int64),
        sample_ids=("a", "b", "c"),
    )


def scored(*rewards: float) -> ScoredBatch:
    return scored_batch(sequences(), rewards=torch.tensor(rewards or (3.0, 0.0, 0.0)))


def corrected(names: tuple[str, ...] = (), bounds: tuple[str, ...] = (), **given: Any) -> TrainerLogprobs:
    correction = RolloutCorrectionPlan(rules=rejection_rules(names, bounds), **given)
    plan = UpdatePlan(loss=LOSS, epochs=1, sequences_per_update=3, on_policy=False, correction=correction)
    return trainer_logprobs(sequences(), Policy(), None, plan)


def test_without_a_correction_nothing_is_touched() -> None:
    plan = UpdatePlan(loss=LOSS, epochs=1, sequences_per_update=3, on_policy=True)
    policy = Policy()
    plain = trainer_logprobs(sequences(), policy, None, plan)
    assert policy.calls == [] and plain.importance_weights is plain.rejected is None
    mask = sequences().response_mask
    assert plain.kept(mask) is mask and correction_metrics(mask, plain) == {}


def test_weights_are_computed_once_over_the_whole_step() -> None:
    # 2, 1, 1, 3 (cut), 1: mean 1.6
    weights = corrected(weights="token", weight_high=3.0).importance_weights
    assert weights.tolist() == [pytest.approx([2, 1]), pytest.approx([1, 3]), pytest.approx([1, 0])]
    normalized = corrected(weights="token", weight_high=3.0, normalize=True).importance_weights
    torch.testing.assert_close(normalized, weights / 1.6)
    banded = corrected(weights="sequence", weight_low=0.5, weight_high=3.0).importance_weights
    assert banded.tolist() == [pytest.approx([2, 2]), [0, 0], pytest.approx([1, 0])]  # 2 x 1; 1 x 4 is outside; 1


def test_what_every_rule_keeps_stays() -> None:
    # k2 = (ln r)^2 / 2: 0.24, 0 | 0, 0.96 | 0
    assert corrected(("token_k2",), ("0.5",)).rejected.tolist() == [[False, False], [False, True], [False, False]]
    both = corrected(("token_k2", "sequence_max_k1"), ("0.5", "0.6_1.5")).rejected  # -ln 2 < ln 0.6 takes the first too
    assert both.tolist() == [[True, True], [True, True], [False, False]]


def test_rejection_leaves_the_loss_before_advantages_are_estimated() -> None:
    shaped = shaped_batch(scored(), corrected(("token_k2",), ("0.5",)))
    # rewards 3, 0, 0: mean 1; the baseline is that of all three
    train = estimate_advantages(shaped, None, AdvantagePlan(name="grpo", parameters={"normalize_by_std": False}))
    assert train.advantages.tolist() == [[2, 2], [-1, 0], [-1, 0]]
    assert train.loss_mask.tolist() == [[True, True], [True, False], [True, False]]
    # opo weighs by the tokens that are left: (2 x 3 + 1 x 0 + 1 x 0) / 4 = 1.5, not the 1.2 of 2, 2 and 1 tokens
    train = estimate_advantages(shaped, None, AdvantagePlan(name="opo"))
    assert train.advantages[:, 0].tolist() == [1.5, -1.5, -1.5]


def test_a_rejected_last_token_leaves_its_reward_to_the_one_before() -> None:
    shaped = shaped_batch(scored(3.0, 5.0, 1.0), corrected(("token_k2",), ("0.5",)))
    train = estimate_advantages(shaped, None, AdvantagePlan(name="reinforce"))
    assert train.advantages.tolist() == [[3, 3], [5, 0], [1, 0]]
    # with rewards on tokens of its own, each token keeps its own and the last kept one gets the rest: 1 + 4
    own = replace(shaped, token_rewards=torch.tensor([[1.0, 2.0], [1.0, 4.0], [1.0, 0.0]]))
    train = estimate_advantages(own, None, AdvantagePlan(name="reinforce"))
    assert train.advantages.tolist() == [[3, 2], [5, 0], [1, 0]]


def test_a_rejected_last_row_leaves_its_reward_to_the_row_before() -> None:
    """Rows 0 and 1 are one trajectory, whose reward of 3 stands on the last token of row 1; row 2 has one of its own."""
    two_rows = replace(sequences(), trajectory_index=torch.tensor([0, 0, 1]))
    rejected = TrainerLogprobs(rejected=torch.tensor([[False, False], [True, True], [False, False]]))
    shaped = shaped_batch(scored_batch(two_rows, rewards=torch.tensor([3.0, 3.0, 1.0])), rejected)
    train = estimate_advantages(shaped, None, AdvantagePlan(name="reinforce"))
    assert train.advantages.tolist() == [[3, 3], [0, 0], [1, 0]]


def test_a_response_that_is_rejected_whole_stays_in_the_baseline() -> None:
    shaped = shaped_batch(scored(), corrected(("sequence_max_k2",), ("0.5",)))
    train = estimate_advantages(shaped, None, AdvantagePlan(name="rloo"))
    # 3 - 0; then 0 - (3 + 0) / 2 on no token; 0 - 1.5
    assert train.advantages.tolist() == [[3, 3], [0, 0], [-1.5, 0]]
    assert train.counts().sequences == 2 and train.counts().tokens == 3


def objective(name: str, train: TrainBatch, **given: Any) -> tuple[float, Tensor]:
    policy = torch.full((3, 2), -1.0, requires_grad=True)
    plan = replace(LOSS, name=name, **given)
    loss, _ = policy_objective(policy, torch.zeros(3, 2), train, plan, train.counts())
    return loss.item(), torch.autograd.grad(loss, policy)[0]


def trained(advantages: list[list[float]], **given: Any) -> TrainBatch:
    return train_batch(sequences(), torch.tensor(advantages), **given)


ONES = [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]


def test_weights_multiply_the_token_loss_after_clipping() -> None:
    weights = torch.tensor([[2.0, 1.0], [1.0, 3.0], [0.5, math.nan]])
    # old log-probs are the policy's own: r = 1; -(2 + 1 + 1 + 3 + 0.5) / 5
    loss, gradient = objective("ppo_clip", trained(ONES, importance_weights=weights))
    assert loss == pytest.approx(-1.5)
    assert gradient.tolist() == [pytest.approx([-0.4, -0.2]), pytest.approx([-0.2, -0.6]), pytest.approx([-0.1, 0])]
    # r = e is clipped to 1.2: the loss is 1.2 x that, without a gradient
    moved = trained(ONES, importance_weights=weights, old=torch.full((3, 2), -2.0))
    loss, gradient = objective("ppo_clip", moved)
    assert loss == pytest.approx(-1.8) and not gradient.any()


def test_a_loss_of_whole_responses_takes_the_geometric_mean_of_their_weights() -> None:
    weights = torch.tensor([[8.0, 2.0], [0.0, 3.0], [0.5, math.nan]])
    # sqrt(16) = 4, 0, 0.5: -(4 + 4 + 0 + 0 + 0.5) / 5
    loss, gradient = objective("geo_mean", trained(ONES, importance_weights=weights))
    assert loss == pytest.approx(-1.7)
    assert gradient.isfinite().all() and not gradient[1].any()


def test_the_samplers_log_probs_can_be_the_old_ones() -> None:
    moved = replace(sequences(), rollout_logprobs=torch.full((3, 2), -2.0))
    train = train_batch(moved, torch.tensor(ONES), old=torch.full((3, 2), -1.0))
    assert objective("ppo_clip", train)[0] == pytest.approx(-1)  # r = 1
    ratio = objective("ppo_clip", train, use_rollout_logprobs=True)[0]
    assert ratio == pytest.approx(-1.2)  # r = e, clipped


def test_the_sft_term_imitates_responses_with_a_positive_score() -> None:
    # -score x log pi on the two tokens of the first response, score 3 before it was normalised: 3 x 1 x 2 / 5 x 0.5
    nothing = [[0.0, 0.0]] * 3
    train = trained(nothing, scores=torch.tensor([3.0, 0.0, -2.0]))
    loss, gradient = objective("ppo_clip", train, sft_coef=0.5)
    assert loss == pytest.approx(0.6)
    assert gradient.tolist() == [pytest.approx([-0.3, -0.3]), [0, 0], [0, 0]]


def test_the_policy_loss_has_a_weight_beside_other_terms() -> None:
    """r = 1: the policy loss is -1, a quarter of it -0.25; the supervised term of the first response stays 0.6."""
    train = trained(ONES, scores=torch.tensor([3.0, 0.0, -2.0]))
    assert objective("ppo_clip", train, policy_coef=0.25)[0] == pytest.approx(-0.25)
    assert objective("ppo_clip", train, policy_coef=0.25, sft_coef=0.5)[0] == pytest.approx(0.35)


def test_responses_may_weigh_differently() -> None:
    """-(2 + 2 + 0.5 + 0.5 + 1) / 5, and the gradient of a token is its weight's share."""
    loss, gradient = objective("ppo_clip", replace(trained(ONES), weights=torch.tensor([2.0, 0.5, 1.0])))
    assert loss == pytest.approx(-1.2)
    assert gradient.tolist() == [pytest.approx([-0.4, -0.4]), pytest.approx([-0.1, -0.1]), pytest.approx([-0.2, 0.0])]


def test_bad_responses_may_have_a_loss_of_their_own() -> None:
    """Scores 3, 0, -2, advantages 0, -1, -2; log pi is -1 everywhere.

    The second has r = e, cut to 1: -1 x -1 x -1 on each of its two tokens; the third r = 1/e: -(1/e) x -2 x -1 on its one. The
    sum -2 - 2/e, over 5 tokens, x 0.5. The gradient is -r x A / 5 x 0.5.
    """
    old = torch.tensor([[-1.0, -1.0], [-2.0, -2.0], [0.0, 0.0]])
    advantages = torch.tensor([[0.0, 0.0], [-1.0, -1.0], [-2.0, 0.0]])
    train = train_batch(sequences(), advantages, scores=torch.tensor([3.0, 0.0, -2.0]), old=old)
    alone = replace(train, advantages=torch.zeros(3, 2))
    without, flat = objective("ppo_clip", train)
    loss, gradient = objective("ppo_clip", train, topr_coef=0.5)
    assert loss - without == pytest.approx(0.5 * (-2 - 2 / math.e) / 5)
    more = (gradient - flat).tolist()
    assert more == [[0, 0], pytest.approx([0.1, 0.1]), pytest.approx([0.2 / math.e, 0.0])]
    assert objective("ppo_clip", alone, topr_coef=0.5)[0] == 0.0


def test_metrics_of_a_correction_by_hand() -> None:
    done = corrected(("token_k2", "sequence_max_k1"), ("0.5", "0.6_1.5"), weights="token", weight_high=3.0)
    # weights 2, 1, 1, 3, 1: mean 1.6; (sum 8)^2 / (sum of squares 16) = 4 of 5 tokens; 4 of 5 tokens and 2 of 3 gone
    assert correction_metrics(sequences().response_mask, done) == pytest.approx(
        {
            "correction/weight_mean": 1.6,
            "correction/weight_max": 3.0,
            "correction/effective_token_share": 0.8,
            "correction/rejected_token_share": 0.8,
            "correction/rejected_response_share": 2 / 3,
        }
    )
    assert "correction/effective_token_share" not in correction_metrics(
        sequences().response_mask, replace(done, importance_weights=torch.zeros(3, 2))
    )


def test_the_gap_is_measured_where_the_starting_weights_scored() -> None:
    first = torch.tensor([[-1.5, -1.0]])  # of the first mini-batch, one row
    metrics = gap_metrics(sequences().rollout_logprobs, first, sequences().response_mask)
    assert (metrics["gap/mean"], metrics["gap/max"], metrics["gap/share_above"]) == (0.25, 0.5, 0.5)
    nothing = torch.zeros_like(sequences().response_mask)  # every episode has failed before its first token
    assert gap_metrics(sequences().rollout_logprobs, first, nothing) == {}


@pytest.mark.parametrize(("estimator", "named"), [("optimal_token_baseline", True), ("grpo", False)])
def test_sums_of_squared_probabilities_come_from_the_policy_at_its_temperature(estimator: str, named: bool) -> None:
    policy = Policy()
    plan = StepPlan(
        prompts=1,
        sampling=SamplingParams(max_response_tokens=2),
        advantage=AdvantagePlan(name=estimator),
        update=UpdatePlan(loss=LOSS, epochs=1, sequences_per_update=3, on_policy=True),
        max_invalid_share=1.0,
    )
    found = add_sum_pi_squared(scored(), policy, plan)
    assert policy.calls == (["sum_pi_squared 0.7"] if named else [])
    extras = {name: values.tolist() for name, values in found.extras.items()}
    assert extras == ({"sum_pi_squared": [[0.5, 0.5], [0.5, 0.5], [0.5, 0]]} if named else {})
