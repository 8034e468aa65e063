"""Mini-batches, epochs and what is logged about them, with a scripted engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from batches import sequence_batch, train_batch
from posttrain.records.batches import LossCounts, TrainBatch
from posttrain.records.plans import (
    CriticUpdatePlan,
    LossPlan,
    RolloutCorrectionPlan,
    UpdatePlan,
    ValueLossPlan,
)
from posttrain.records.statistics import ForwardBackwardStats, LossStats, OptimizerStats, UpdateStats
from posttrain.steps.update import merged, policy_updates, update, update_critic

LOSS = LossPlan(name="ppo_clip", aggregation="token_mean", temperature=1.0)


class ScriptedEngine:
    """Losses and skipped steps as told; notes what it is given. Log-probs are minus the number of the call."""

    def __init__(self, losses: list[float] | None = None, skip: set[int] | None = None) -> None:
        self.losses, self.skip = losses, skip or set()
        self.seen: list[tuple[tuple[str, ...], LossCounts]] = []
        self.high_entropy: list[list[list[int]] | None] = []
        self.proximal_shares: list[list[list[float]] | None] = []
        self.begun = self.steps = self.zeroed = 0

    @property
    def version(self) -> int:
        return 5 + self.steps - len([step for step in self.skip if step <= self.steps])

    def forward_backward(self, batch: TrainBatch, loss: LossPlan, counts: LossCounts) -> ForwardBackwardStats:
        self.seen.append((batch.sequences.sample_ids, counts))
        self.high_entropy.append(None if batch.high_entropy is None else batch.high_entropy.int().tolist())
        share = batch.logprobs.proximal_share
        self.proximal_shares.append(None if share is None else share.tolist())
        number = len(self.seen)
        return ForwardBackwardStats(
            loss=self.losses[number - 1] if self.losses else float(number),
            sums={"policy/entropy": 10.0 * number},
            tokens=counts.tokens,
            policy_logprobs=torch.full(batch.loss_mask.shape, -float(number)),
        )

    def optimizer_step(self) -> OptimizerStats:
        self.steps += 1
        return OptimizerStats(grad_norm=2.0 * self.steps, lr=0.1 * self.steps, skipped=self.steps in self.skip)

    def zero_grad(self) -> None:
        self.zeroed += 1

    def begin_step(self) -> None:
        self.begun += 1


def make_batch(loss_tokens: list[int], old: bool = False) -> TrainBatch:
    rows, length = len(loss_tokens), 4
    mask = torch.arange(length) < torch.tensor(loss_tokens)[:, None]
    sequences = sequence_batch(
        tokens=torch.zeros(rows, 1 + length, dtype=torch.int64),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        response_mask=torch.ones(rows, length, dtype=torch.bool),
        rollout_logprobs=torch.zeros(rows, length),
        group_index=torch.zeros(rows, dtype=torch.int64),
        sample_ids=tuple("abcdefgh"[:rows]),
    )
    return train_batch(sequences, loss_mask=mask, old=torch.full((rows, length), -0.5) if old else None)


def plan(epochs: int = 1, sequences: int = 2) -> UpdatePlan:
    return UpdatePlan(loss=LOSS, epochs=epochs, sequences_per_update=sequences, on_policy=False)


def test_every_epoch_visits_every_mini_batch_with_its_own_counts() -> None:
    engine, ticks = ScriptedEngine(), []
    stats = update(engine, make_batch([4, 1, 0, 2], old=True), plan(epochs=2), ticks.append)
    first, second = ("a", "b"), ("c", "d")
    counts = [
        LossCounts(tokens=5, sequences=2, prompt_tokens={0: 5}),
        LossCounts(tokens=2, sequences=1, prompt_tokens={0: 2}),
    ]
    assert engine.seen == [(first, counts[0]), (second, counts[1])] * 2
    assert ticks == [2, 2, 2, 2]
    assert (stats.updates, stats.skipped_updates) == (4, 0)


def test_metrics_are_token_means_and_update_means() -> None:
    stats = update(ScriptedEngine(), make_batch([4, 1, 0, 2], old=True), plan())
    assert stats.metrics == pytest.approx(
        {
            "policy/entropy": (10 + 20) / (5 + 2),
            "policy/loss": (1 + 2) / 2,
            "policy/grad_norm": (2 + 4) / 2,
            "policy/lr": (0.1 + 0.2) / 2,
            "policy/skipped_updates": 0.0,
        }
    )


def test_tokens_of_high_entropy_are_chosen_over_a_mini_batch() -> None:
    batch = make_batch([2, 1, 2, 2], old=True)
    entropies = torch.tensor([[0.9, 0.1, 9, 9], [0.2, 9, 9, 9], [0.3, 0.4, 9, 9], [0.5, 0.6, 9, 9]])
    batch = replace(batch, logprobs=replace(batch.logprobs, entropies=entropies))
    chosen, engine = plan(), ScriptedEngine()
    update(engine, batch, replace(chosen, loss=replace(chosen.loss, high_entropy_share=0.5)))
    # 0.9 and 0.2 of three loss tokens; 0.5 and 0.6 of four
    first, second = [[1, 0, 0, 0], [1, 0, 0, 0]], [[0, 0, 0, 0], [1, 1, 0, 0]]
    assert engine.high_entropy == [first, second]
    plain = ScriptedEngine()
    update(plain, batch, chosen)
    assert plain.high_entropy == [None, None] and plain.seen == engine.seen  # the same counts


@pytest.mark.parametrize(("skip", "second"), [(set(), [1 / 2, 0]), ({1}, [1, 1])])
def test_proximal_log_probs_are_interpolated_by_the_updates_of_the_step(skip: set[int], second: list[float]) -> None:
    """Tokens of the versions 4 and 5, the step begins with version 5; an update that is skipped makes no version."""
    batch = make_batch([2, 2])
    versions = torch.tensor([[4, 5, 5, 5], [4, 5, 5, 5]])
    batch = replace(batch, sequences=replace(batch.sequences, versions=versions))
    chosen = replace(plan(sequences=1), correction=RolloutCorrectionPlan(weights="token", interpolated=True))
    engine = ScriptedEngine(skip=skip)
    update(engine, batch, chosen)
    # (5 - 4) / (6 - 4) = 1/2; (5 - 5) / (6 - 5) = 0
    first, then = engine.proximal_shares
    assert first == [[1.0] * 4] and then == [[second[0]] + [second[1]] * 3]
    plain = ScriptedEngine()
    update(plain, batch, plan())
    assert plain.proximal_shares == [None]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_is_dropped_and_counted(bad: float) -> None:
    engine = ScriptedEngine(losses=[bad, 3.0])
    stats = update(engine, make_batch([1, 1, 1, 1], old=True), plan())
    assert (engine.steps, engine.zeroed) == (1, 1)
    assert (stats.updates, stats.skipped_updates) == (1, 1)
    assert stats.metrics["policy/loss"] == 3.0
    assert stats.metrics["policy/entropy"] == 20 / 2  # the dropped mini-batch is not part of the means


def test_mini_batch_without_a_loss_token_makes_no_update() -> None:
    """Weight decay and momentum would move the weights even without a gradient."""
    engine = ScriptedEngine()
    stats = update(engine, make_batch([0, 0, 3, 3], old=True), plan())
    assert (engine.steps, engine.zeroed) == (1, 1)
    assert (stats.updates, stats.skipped_updates) == (1, 1)


def test_step_without_any_update_has_no_numbers_about_updates() -> None:
    stats = update(ScriptedEngine(skip={1, 2}), make_batch([1, 1, 1, 1], old=True), plan())
    assert stats.metrics == {"policy/skipped_updates": 2.0}
    assert (stats.updates, stats.skipped_updates) == (0, 2)


def test_first_log_probs_of_drawn_mini_batches_are_of_no_leading_rows() -> None:
    drawn = replace(plan(), shuffle_seed=1)
    assert update(ScriptedEngine(), make_batch([1, 1, 1]), drawn).trainer_logprobs is None
    assert update(ScriptedEngine(), make_batch([1, 1]), drawn).trainer_logprobs is not None  # one mini-batch


def test_trainer_logprobs_are_the_old_ones_or_those_of_the_first_epoch() -> None:
    assert update(ScriptedEngine(), make_batch([1, 1], old=True), plan()).trainer_logprobs.unique().tolist() == [-0.5]
    stats = update(ScriptedEngine(), make_batch([1, 1, 1]), plan(epochs=2, sequences=3))
    assert stats.trainer_logprobs.shape == (3, 4)
    assert stats.trainer_logprobs.unique().tolist() == [-1.0]


# ------------------------------------------------------------------------------------------------------- the critic


class ScriptedCritic(ScriptedEngine):
    def forward_backward(self, batch: TrainBatch, loss: ValueLossPlan, counts: LossCounts) -> LossStats:  # type: ignore[override]
        assert loss == CRITIC.loss
        stats = super().forward_backward(batch, LOSS, counts)
        return LossStats(loss=stats.loss, sums={"critic/value_clip_fraction": 1.0}, tokens=stats.tokens)


CRITIC = CriticUpdatePlan(
    loss=ValueLossPlan(value_clip=0.5, aggregation="token_mean"), epochs=2, sequences_per_update=3
)


def test_the_critic_has_epochs_mini_batches_and_metrics_of_its_own() -> None:
    critic, ticks = ScriptedCritic(skip={2}), []
    stats = update_critic(critic, make_batch([4, 1, 0, 0]), CRITIC, ticks.append)
    # Twice (a, b, c), made and made, the second refused by the optimizer; twice (d), which has no loss token.
    assert [ids for ids, _ in critic.seen] == [("a", "b", "c"), ("d",)] * 2
    assert ticks == [3, 1, 3, 1]
    assert (stats.updates, stats.skipped_updates, stats.trainer_logprobs) == (1, 3, None)
    assert stats.metrics == pytest.approx(
        {
            "critic/value_clip_fraction": 1 / 5,
            "critic/loss": 1.0,
            "critic/grad_norm": 2.0,
            "critic/lr": 0.1,
            "critic/skipped_updates": 3.0,
        }
    )


def test_both_models_in_one() -> None:
    batch = make_batch([1, 1, 1, 1], old=True)
    policy, critic = update(ScriptedEngine(), batch, plan()), update_critic(ScriptedCritic(), batch, CRITIC)
    both = merged(batch, policy, critic)
    assert (both.updates, both.skipped_updates) == (2, 0)  # the policy made 2, the critic 4
    assert both.metrics == {**policy.metrics, **critic.metrics}
    assert both.trainer_logprobs is policy.trainer_logprobs


def test_a_model_that_cannot_learn_makes_a_step_without_an_update() -> None:
    batch = make_batch([1, 1, 1, 1], old=True)
    broken = update_critic(ScriptedCritic(losses=[math.nan] * 4), batch, CRITIC)
    both = merged(batch, update(ScriptedEngine(), batch, plan()), broken)
    assert (both.updates, both.skipped_updates) == (0, 4)


def test_a_warmup_step_counts_by_its_critic() -> None:
    """The policy is not due: its log-probs are known only where they were computed before."""
    for old in (True, False):
        batch = make_batch([1, 1, 1, 1], old=old)
        stats = merged(batch, None, update_critic(ScriptedCritic(), batch, CRITIC))
        assert (stats.updates, stats.skipped_updates) == (4, 0)
        assert not any(name.startswith("policy/") for name in stats.metrics)
        assert stats.trainer_logprobs is batch.logprobs.old


class ElsewhereEngine(ScriptedEngine):
    """An engine in other processes, which make the updates of a step on their own."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[UpdatePlan | CriticUpdatePlan] = []

    def make_updates(self, batch: TrainBatch, plan: UpdatePlan | CriticUpdatePlan, on_sequences: Any) -> UpdateStats:
        self.asked.append(plan)
        assert isinstance(plan, UpdatePlan)
        return policy_updates(ScriptedEngine(), batch, plan, on_sequences)


@pytest.mark.parametrize("old", [True, False])
def test_an_engine_elsewhere_is_asked_once_for_all_updates_of_a_step(old: bool) -> None:
    here, elsewhere, ticks = ScriptedEngine(), ElsewhereEngine(), []
    batch = make_batch([4, 1, 0, 2], old=old)
    expected, found = update(here, batch, plan(epochs=2)), update(elsewhere, batch, plan(epochs=2), ticks.append)
    assert elsewhere.asked == [plan(epochs=2)] and not elsewhere.seen and ticks == [2, 2, 2, 2]
    assert (found.metrics, found.updates) == (expected.metrics, expected.updates)
    assert found.trainer_logprobs is not None and expected.trainer_logprobs is not None
    assert torch.equal(found.trainer_logprobs, expected.trainer_logprobs)
    assert len(found.trainer_logprobs) == (4 if old else 2)  # of the whole step, or of the first mini-batch


def test_tokens_that_are_chosen_over_a_mini_batch_are_chosen_here() -> None:
    batch = make_batch([2, 1, 2, 2], old=True)
    batch = replace(batch, logprobs=replace(batch.logprobs, entropies=torch.rand(4, 4)))
    elsewhere = ElsewhereEngine()
    update(elsewhere, batch, replace(plan(), loss=replace(LOSS, high_entropy_share=0.5)))
    assert not elsewhere.asked and len(elsewhere.seen) == 2
