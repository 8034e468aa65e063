"""Proximal log-probs without a forward pass: between those of the policy that sampled and those of the policy that learns."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape


def proximal_share(versions: Tensor, *, proximal: int, policy: int) -> Tensor:
    """alpha = (v_proximal - v_behaviour) / (v_policy - v_behaviour), the way from behaviour to current policy, in updates.

    By hand: a token of version 0, the step began at version 1, the policy is at 2: (1 - 0) / (2 - 0) = 1/2. Where the policy is
    still at the step's start it is 1, because both are the same weights; where a token is of the start's weights and
    the policy has moved it is 0.

    Args: versions [B, T] int64 of the weights that sampled each token; proximal <= policy, versions of the weights at the start
        of the step and now.
    Returns: [B, T] float32 in [0, 1].
    Source: AReaL's prox_logp_method "loglinear", which counts steps and so has v_policy = v_proximal + 1 in every mini-batch.
    """
    if policy == proximal:
        return torch.ones(versions.shape)
    return ((proximal - versions) / (policy - versions).clamp(min=1)).clamp(0.0, 1.0).float()


def interpolated_logprobs(policy_logprobs: Tensor, rollout_logprobs: Tensor, share: Tensor, mask: Tensor) -> Tensor:
    """log pi_proximal ~ log pi_behaviour + alpha (log pi - log pi_behaviour): a geometric mean of both policies.

    By hand: behaviour -1.0, policy -1.5, alpha 1/2 gives -1.25.

    Args: log-probs [B, T] nats; share (alpha) [B, T]; mask [B, T] bool.
    Returns: [B, T] nats, without gradient; 0 where mask is False.
    """
    check_same_shape(policy_logprobs=policy_logprobs, rollout_logprobs=rollout_logprobs, share=share, mask=mask)
    current = policy_logprobs.detach()
    return torch.where(mask, rollout_logprobs + share * (current - rollout_logprobs), 0.0)
