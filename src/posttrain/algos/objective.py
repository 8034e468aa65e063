"""The policy's whole objective: the chosen policy loss, the entropy bonus and the KL to the reference, each a number per token
that is aggregated over the mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.further_terms import further_terms
from posttrain.algos.kl import importance_weighted, token_kl
from posttrain.algos.off_policy_mask import off_policy_tokens
from posttrain.algos.old_policy import old_logprobs, weights_of_tokens
from posttrain.algos.ratio import row_mean
from posttrain.algos.shapes import check_same_shape
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
    divergence: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """policy_coef * policy loss - entropy_coef * entropy + kl_coef * KL(policy || reference) + sft_coef * SFT + topr_coef * TOPR
    + coef * divergence from teachers, each aggregated by ``counts``.

    Without old log-probs (one update per step) the policy's own, detached, take their place: the ratio is 1 and its
    gradient is that of the log-prob. Importance weights and weights of responses multiply the policy loss after its
    clipping. SFT is -score x log pi on the responses whose score is above 0, TOPR -min(pi / pi_old, 1) x advantage x log pi
    on the others. The entropy has an aggregation of its own. Tokens that off_policy_limit or the batch's high-entropy mask
    take out of the policy loss still count in its divisor, and stay in the other terms.

    Args: policy_logprobs and entropy [B, T] nats, carrying grad; batch: the same B rows; full_kl [B, T] nats, carrying
        grad: the KL over the whole vocabulary, which kl_estimator "full" asks for; divergence [B, T] nats, carrying grad: from
        the teachers, where it is over the vocabulary.
    Returns: scalar loss (this part's share of the mini-batch's), and sums over loss tokens by metric name.
    """
    mask, sequences = batch.loss_mask, batch.sequences

    def aggregated(values: Tensor, mode: str = plan.aggregation) -> Tensor:
        return aggregate(
            values,
            mask,
            mode,
            counts,
            norm_tokens=plan.norm_tokens,
            group_index=sequences.group_index,
        )

    scores = batch.scores
    token_loss, report = _policy_loss(policy_logprobs, scores, batch, plan, counts)
    report = {f"policy/{name}": values for name, values in report.items()}
    weights = weights_of_tokens(policy_logprobs, batch, plan)
    if weights is not None:
        per_response = POLICY_LOSSES.describe(plan.name, plan.path).facts.per_response
        token_loss = token_loss * loss_weights(weights, mask, per_response=per_response)
        if batch.logprobs.proximal_share is not None:
            report["policy/importance_weight"] = weights
    if plan.off_policy_limit is not None:
        stale = off_policy_tokens(
            policy_logprobs,
            batch.sequences.rollout_logprobs,
            batch.advantages,
            mask,
            limit=plan.off_policy_limit,
        )
        token_loss = torch.where(stale, 0.0, token_loss)
        report["policy/off_policy_fraction"] = stale.float()
    if batch.high_entropy is not None:
        token_loss = torch.where(batch.high_entropy, token_loss, 0.0)
        report["policy/high_entropy_fraction"] = batch.high_entropy.float()
    if batch.weights is not None:
        token_loss = token_loss * batch.weights[:, None]
    loss = plan.policy_coef * aggregated(token_loss)
    report["policy/pg_loss"] = token_loss
    report["policy/entropy"] = entropy
    if plan.entropy_coef:
        loss = loss - plan.entropy_coef * aggregated(entropy, plan.entropy_aggregation)
    old = old_logprobs(policy_logprobs, batch, plan)
    for name, (coef, values) in further_terms(policy_logprobs, old, divergence, batch, plan).items():
        loss = loss + coef * aggregated(values)
        report[name] = values
    if plan.kl_coef:
        if plan.kl_estimator == "full":
            assert full_kl is not None, "kl_estimator full without a reference model"
            kl = torch.where(mask, full_kl, 0.0)
        else:
            assert batch.logprobs.ref is not None, "a KL coefficient without reference log-probs"
            kl = token_kl(plan.kl_estimator, policy_logprobs, batch.logprobs.ref, mask)
            if plan.kl_importance_weighted:
                kl = importance_weighted(kl, policy_logprobs, old, mask)
        loss = loss + plan.kl_coef * aggregated(kl, plan.kl_aggregation or plan.aggregation)
        report["reference/kl"] = kl
    sums = {name: float(torch.where(mask, values.detach(), 0.0).sum()) for name, values in report.items()}
    return loss, sums


def _policy_loss(
    policy_logprobs: Tensor, scores: Tensor, batch: TrainBatch, plan: LossPlan, counts: LossCounts
) -> tuple[Tensor, dict[str, Tensor]]:
    """The chosen loss per token [B, T], and its report. A loss names what it needs by its positional parameters, among these;
    mini_batch_tokens is the number of loss tokens."""
    available = {
        "policy_logprobs": policy_logprobs,
        "old_logprobs": old_logprobs(policy_logprobs, batch, plan),
        "rollout_logprobs": batch.sequences.rollout_logprobs,
        "advantages": batch.advantages,
        "mask": batch.loss_mask,
        "scores": scores,
        "mini_batch_tokens": counts.tokens,
        "chosen": batch.chosen,
    }
    policy_loss = POLICY_LOSSES.get(plan.name, plan.path)
    inputs = [available[name] for name in POLICY_LOSSES.describe(plan.name, plan.path).inputs]
    token_loss, report = policy_loss(*inputs, **plan.parameters)
    return token_loss, report


def loss_weights(weights: Tensor, mask: Tensor, *, per_response: bool) -> Tensor:
    """The importance weights [B, T]; for a loss of whole responses the geometric mean over the response's loss tokens (0 when
    one of them is 0)."""
    return row_mean(weights.log(), mask).exp() if per_response else weights


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: str,
    counts: LossCounts,
    *,
    norm_tokens: int | None = None,
    group_index: Tensor | None = None,
) -> Tensor:
    """Token losses as one number: this part's share of the mini-batch's loss; the shares of all parts, on all devices, sum to it.

    token_mean: sum of values / counts.tokens. token_sum: sum of values, divided by nothing.
    sequence_mean_token_mean: each row's mean, summed / counts.sequences. sequence_mean_token_sum: each row's sum,
    summed / counts.sequences. sequence_mean_token_sum_norm: the same / norm_tokens besides, as in verl 0.9 and SkyRL (verl
    before 0.7 and ROLL divide the sum of all values by a number of tokens and not by that of rows). prompt_mean: the mean over
    the tokens of all responses to a prompt, summed / number of prompts (SkyRL). Rows and prompts without a loss token do not
    count.

    Args: values [B, T]; mask [B, T] bool; counts over the whole mini-batch; norm_tokens and group_index [B] int64, for the
        modes that read them.
    Returns: scalar, in the unit of values; 0 (with a zero gradient) when nothing is masked in.
    """
    check_same_shape(values=values, mask=mask)
    kept = torch.where(mask, values, 0.0)
    if mode == "token_mean":
        return kept.sum() / max(counts.tokens, 1)
    if mode == "token_sum":
        return kept.sum()
    if mode == "sequence_mean_token_mean":
        row_tokens = mask.sum(dim=1).clamp(min=1)
        return (kept.sum(dim=1) / row_tokens).sum() / max(counts.sequences, 1)
    if mode == "sequence_mean_token_sum":
        return kept.sum() / max(counts.sequences, 1)
    if mode == "sequence_mean_token_sum_norm":
        assert norm_tokens is not None, "sequence_mean_token_sum_norm divides by norm_tokens"
        return kept.sum() / (max(counts.sequences, 1) * norm_tokens)
    if mode == "prompt_mean":
        assert group_index is not None, "prompt_mean needs to know the rows of a prompt"
        prompt_tokens = [counts.prompt_tokens.get(group, 1) for group in group_index.tolist()]
        row_sums = kept.sum(dim=1) / torch.tensor(prompt_tokens, dtype=kept.dtype, device=kept.device)
        return row_sums.sum() / max(len(counts.prompt_tokens), 1)
    raise KeyError(f"unknown aggregation {mode!r}")
