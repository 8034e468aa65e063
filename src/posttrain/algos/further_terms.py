"""Terms of the policy's objective beside the policy loss, entropy and KL: imitation of good responses, and of teachers."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.distilled_tokens import sampled_divergence
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan


def further_terms(
    policy_logprobs: Tensor, old_logprobs: Tensor, divergence: Tensor | None, batch: TrainBatch, plan: LossPlan
) -> dict[str, tuple[float, Tensor]]:
    """The terms of the plan, by metric name: coefficient, and a number per token [B, T].

    Args: policy_logprobs [B, T] nats, carrying grad; old_logprobs [B, T] nats; divergence [B, T] nats, carrying grad, from the
        teachers, where it is over the vocabulary.
    """
    mask, scores = batch.loss_mask, batch.scores
    found: dict[str, tuple[float, Tensor]] = {}
    if plan.sft_coef:
        imitated = mask & (scores > 0)[:, None]
        sft = torch.where(imitated, -scores[:, None] * torch.where(imitated, policy_logprobs, 0.0), 0.0)
        found["policy/sft_loss"] = plan.sft_coef, sft
    if plan.topr_coef:
        wrong = mask & (scores <= 0)[:, None]
        ratio = torch.where(wrong, policy_logprobs.detach() - old_logprobs, 0.0).exp().clamp(max=1.0)
        kept = torch.where(wrong, policy_logprobs, 0.0)
        found["policy/topr_loss"] = plan.topr_coef, -ratio * torch.where(wrong, batch.advantages, 0.0) * kept
    if plan.distillation:
        if plan.distillation.of_sampled_tokens:
            divergence = sampled_divergence(policy_logprobs, batch.teachers, mask, plan.distillation)
        assert divergence is not None, "a divergence over the vocabulary is computed with the log-probs"
        found["distillation/divergence"] = plan.distillation.coef, torch.where(mask, divergence, 0.0)
    return found
