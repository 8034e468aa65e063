"""Log-probs of the policy that a loss compares with, and the weights of its tokens: of the step, or interpolated per update."""

from __future__ import annotations

from torch import Tensor

from posttrain.algos.proximal import interpolated_logprobs
from posttrain.algos.rollout_correction import importance_weights
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan


def old_logprobs(policy_logprobs: Tensor, batch: TrainBatch, plan: LossPlan) -> Tensor:
    """Log-probs [B, T] of the policy that the ratio is to: the sampler's, the trainer's before the first update, those
    interpolated between the sampler's and the policy's, or, with one update per step, the policy's own."""
    share = batch.logprobs.proximal_share
    if share is not None:
        sequences = batch.sequences
        return interpolated_logprobs(policy_logprobs, sequences.rollout_logprobs, share, sequences.response_mask)
    old = batch.sequences.rollout_logprobs if plan.use_rollout_logprobs else batch.logprobs.old
    return policy_logprobs.detach() if old is None else old


def weights_of_tokens(policy_logprobs: Tensor, batch: TrainBatch, plan: LossPlan) -> Tensor | None:
    """The weights [B, T] that multiply the token losses: those of the step, or with interpolated log-probs those of the update;
    None without any."""
    if batch.logprobs.proximal_share is None:
        return batch.logprobs.importance_weights
    correction, sequences = plan.correction, batch.sequences
    assert correction is not None, "log-probs are interpolated for the weights of a correction"
    return importance_weights(
        old_logprobs(policy_logprobs, batch, plan),
        sequences.rollout_logprobs,
        sequences.response_mask,
        level=correction.weights,
        high=correction.weight_high,
        low=correction.weight_low,
    )
