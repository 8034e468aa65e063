"""A learning rate that moves once per step counts steps, however many updates they made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from batches import sequence_batch, train_batch
from posttrain.backends.torch_training.rates import learning_rate_factor, updates_per_move
from posttrain.backends.torch_training.update_count import UpdateCount
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.policy import OptimizerConfig, ScheduleConfig
from posttrain.models.loading import load_causal_lm
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan, UpdatePlan
from posttrain.steps.update import update

LOSS = LossPlan(
    name="ppo_clip",
    parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    aggregation="token_mean",
    temperature=1.0,
)
PLAN = UpdatePlan(loss=LOSS, epochs=1, sequences_per_update=2, on_policy=True)


def batch(in_loss: list[bool]) -> TrainBatch:
    """Responses of three tokens; a mini-batch without a token in the loss makes no update."""
    rows = len(in_loss)
    sequences = sequence_batch(
        tokens=torch.randint(0, 256, (rows, 5), generator=torch.Generator().manual_seed(1)),
        prompt_lengths=torch.full((rows,), 2),
        response_mask=torch.ones(rows, 3, dtype=torch.bool),
    )
    advantages = torch.where(torch.arange(rows)[:, None] % 2 == 0, 1.0, -1.0).expand(rows, 3)
    return train_batch(sequences, advantages, sequences.response_mask & torch.tensor(in_loss)[:, None])


@pytest.fixture
def engine(tiny_llama: Path) -> Callable[[str], LocalTrainEngine]:
    """The rate falls from 1 to 0 over five steps of two updates each."""

    def make(moves_every: str) -> LocalTrainEngine:
        schedule = ScheduleConfig(name="linear", moves_every=moves_every)
        return LocalTrainEngine(
            load_causal_lm(str(tiny_llama), dtype=torch.float32),
            AutoTokenizer.from_pretrained(tiny_llama),
            optimizer=OptimizerConfig(lr=1.0e-3),
            learning_rate_factor=learning_rate_factor(schedule, 10, 2),
            updates_per_step=updates_per_move(schedule, 2),
            sequences_per_micro_batch=4,
            sequences_per_scoring_batch=4,
        )

    return make


def test_a_skipped_update_does_not_shift_the_rate(engine: Callable[[str], LocalTrainEngine], tmp_path: Path) -> None:
    policy = engine("step")
    assert update(policy, batch([True] * 4), PLAN).metrics["policy/lr"] == pytest.approx(1.0e-3)
    skipped = update(policy, batch([False, False, True, True]), PLAN)
    assert (skipped.updates, skipped.skipped_updates) == (1, 1)
    assert skipped.metrics["policy/lr"] == pytest.approx(0.8e-3)
    # a step without any update, and one that is shorter than planned, are steps as well
    assert update(policy, batch([False] * 4), PLAN).updates == 0
    assert update(policy, batch([True] * 2), PLAN).metrics["policy/lr"] == pytest.approx(0.4e-3)
    policy.save(tmp_path)
    resumed = engine("step")
    resumed.load(tmp_path)
    assert update(resumed, batch([True] * 4), PLAN).metrics["policy/lr"] == pytest.approx(0.2e-3)


def test_a_rate_that_moves_with_every_update_counts_those_that_were_made(
    engine: Callable[[str], LocalTrainEngine],
) -> None:
    policy = engine("update")
    update(policy, batch([True] * 4), PLAN)
    assert update(policy, batch([False, False, True, True]), PLAN).metrics["policy/lr"] == pytest.approx(0.8e-3)
    assert update(policy, batch([True] * 4), PLAN).metrics["policy/lr"] == pytest.approx((0.7e-3 + 0.6e-3) / 2)


def test_counters_of_an_earlier_version_have_no_steps() -> None:
    count = UpdateCount(updates_per_step=2)
    count.restore({"updates": 6})
    assert (count.steps, count.saved()) == (3, {"updates": 6, "steps": 3})
    count.restore(None)
    assert (count.made, count.steps, count.place) == (0, 0, 0)
    assert UpdateCount(made=5).saved() == {"updates": 5}
