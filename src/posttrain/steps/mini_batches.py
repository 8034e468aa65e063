"""The mini-batches of a step: their rows, and the tokens that the policy loss is computed on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from posttrain.algos.chosen_tokens import chosen_tokens
from posttrain.algos.high_entropy import high_entropy_tokens
from posttrain.algos.proximal import proximal_share
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import CriticUpdatePlan, LossPlan, OneUpdate, UpdatePlan


def rows_per_update(
    batch: TrainBatch, plan: UpdatePlan | CriticUpdatePlan | OneUpdate, epoch: int = 0
) -> list[list[int]]:
    """The rows of each mini-batch. Trajectories are counted, so that a step has as many updates as its plan says, into however
    many rows its episodes were cut; all rows of a trajectory are in one mini-batch, in the order of the batch.

    With a seed to shuffle by, each pass draws which trajectories a mini-batch has; seed and number of the pass alone decide.
    """
    _, number = batch.sequences.trajectory_index.unique_consecutive(return_inverse=True)
    places = number.tolist()
    if plan.shuffle_seed is not None and is_drawn(batch, plan):
        drawn = np.random.Generator(np.random.PCG64([plan.shuffle_seed, epoch])).permutation(places[-1] + 1)
        places = [int(drawn[place]) for place in places]
    found: dict[int, list[int]] = {}
    for row, place in enumerate(places):
        found.setdefault(place // plan.sequences_per_update, []).append(row)
    return [found[mini_batch] for mini_batch in sorted(found)]


def is_drawn(batch: TrainBatch, plan: UpdatePlan | CriticUpdatePlan | OneUpdate) -> bool:
    """Tell whether the mini-batches are drawn at random: one that holds the whole step is not."""
    trajectories = len(batch.sequences.trajectory_index.unique_consecutive())
    return plan.shuffle_seed is not None and trajectories > plan.sequences_per_update


def with_high_entropy(mini_batch: TrainBatch, share: float | None) -> TrainBatch:
    """The mini-batch with the tokens of the policy loss chosen over all of it, so that micro-batches change nothing; unchanged
    without a share."""
    if share is None:
        return mini_batch
    entropies = mini_batch.logprobs.entropies
    assert entropies is not None, "tokens are chosen by the entropies of the step"
    return replace(mini_batch, high_entropy=high_entropy_tokens(entropies, mini_batch.loss_mask, share=share))


def with_choice(mini_batch: TrainBatch, policy: TrainEngine, plan: LossPlan) -> TrainBatch:
    """The mini-batch with the tokens that the loss chooses over all of it, by the policy as it is now; unchanged where the loss
    sees all of them at once."""
    if not plan.chooses_before or not bool(mini_batch.loss_mask.any()):
        return mini_batch
    logprobs = policy.logprobs(mini_batch.sequences, plan.temperature)
    return replace(mini_batch, chosen=chosen_tokens(logprobs, mini_batch, plan))


def with_proximal_share(mini_batch: TrainBatch, *, proximal: int, policy: int) -> TrainBatch:
    """The mini-batch with the way of every token from its sampler's policy to the current one at which the policy of the step's
    start lies. Args: versions of the weights at the step's start and now."""
    versions = mini_batch.sequences.versions
    assert versions is not None, "proximal log-probs are interpolated by the versions of the tokens"
    share = proximal_share(versions, proximal=proximal, policy=policy)
    return replace(mini_batch, logprobs=replace(mini_batch.logprobs, proximal_share=share))
