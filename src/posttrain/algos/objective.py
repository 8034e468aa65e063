"""The policy's whole objective: the chosen policy loss, the entropy bonus and the KL to the reference."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from posttrain.algos.aggregation import aggregate
from posttrain.algos.kl import token_kl
from posttrain.records.batches import LossCounts, TrainBatch
from posttrain.records.plans import LossPlan
from posttrain.registry import POLICY_LOSSES


def policy_objective(
    policy_logprobs: Tensor,
    entropy: Tensor,
    batch: TrainBatch,
    plan: LossPlan,
    counts: LossCounts,
    full_kl: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """policy loss - entropy_coef * entropy + kl_coef * KL(policy || reference), each aggregated by ``counts``.

    Without old log-probs (one update per step) the policy's own, detached, take their place: the ratio is 1 and its
    gradient is that of the log-prob. A loss with a parameter mini_batch_tokens is told how many loss tokens there are.

    Args: policy_logprobs and entropy [B, T] nats, carrying grad; batch: the same B rows; full_kl [B, T] nats, carrying
        grad: the KL over the whole vocabulary, which kl_estimator "full" asks for.
    Returns: scalar loss (this part's share of the mini-batch's), and sums over loss tokens by metric name.
    """
    mask = batch.loss_mask
    old_logprobs = batch.sequences.old_logprobs
    if old_logprobs is None:
        old_logprobs = policy_logprobs.detach()
    policy_loss = POLICY_LOSSES.get(plan.name)
    parameters = dict(plan.parameters)
    if "mini_batch_tokens" in inspect.signature(policy_loss).parameters:
        parameters["mini_batch_tokens"] = counts.tokens
    token_loss, report = policy_loss(policy_logprobs, old_logprobs, batch.advantages, mask, **parameters)
    loss = aggregate(token_loss, mask, plan.aggregation, counts)
    report = {f"policy/{name}": values for name, values in report.items()}
    report["policy/entropy"] = entropy
    if plan.entropy_coef:
        loss = loss - plan.entropy_coef * aggregate(entropy, mask, plan.aggregation, counts)
    if plan.kl_coef:
        if plan.kl_estimator == "full":
            assert full_kl is not None, "kl_estimator full without a reference model"
            kl = torch.where(mask, full_kl, 0.0)
        else:
            assert batch.sequences.ref_logprobs is not None, "a KL coefficient without reference log-probs"
            kl = token_kl(plan.kl_estimator, policy_logprobs, batch.sequences.ref_logprobs, mask)
        loss = loss + plan.kl_coef * aggregate(kl, mask, plan.aggregation, counts)
        report["reference/kl"] = kl
    sums = {name: float(torch.where(mask, values.detach(), 0.0).sum()) for name, values in report.items()}
    return loss, sums
