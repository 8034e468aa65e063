"""Soft adaptive policy optimisation: a smooth gate in the place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import Positive


@POLICY_LOSSES.register("sapo", aggregation="sequence_mean_token_mean")
def sapo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    gate_sharpness_positive: Positive = 1.0,
    gate_sharpness_negative: Positive = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sigmoid(tau (r - 1)) 4 / tau per token, with r = exp(policy - old).

    tau is gate_sharpness_positive where A > 0 and gate_sharpness_negative elsewhere. At r = 1 the gradient is that of
    -A r; the further away, the less of it is left. The paper averages over tokens and then over responses, which is
    aggregation sequence_mean_token_mean.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool.
    Settings:
        gate_sharpness_positive: how sharply the gate closes as the ratio leaves 1, for tokens with a positive advantage.
        gate_sharpness_negative: the same for tokens with a negative advantage.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: ratio_mean, kl_old.
    Source: arXiv:2511.20347.
    """
    log_r = log_ratio(policy_logprobs, old_logprobs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    sharpness = torch.where(advantages > 0, gate_sharpness_positive, gate_sharpness_negative)
    gate = torch.sigmoid(sharpness * (log_r.exp() - 1)) * 4 / sharpness
    return -advantages * gate, distance_report(log_r, mask)
