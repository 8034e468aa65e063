"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import log_ratio
from posttrain.algos.shapes import check_same_shape


def token_kl(estimator: str, policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The named estimate for each token, with d = policy_logprobs - ref_logprobs.

    k1: d (unbiased, can be negative). abs: |d|. k2: d^2 / 2 (biased, its gradient is the KL's). k3: exp(-d) - 1 + d
    (unbiased, never negative); -d is clamped to [-20, 20] and k3 to at most 10, so one token cannot overflow the sum.
    k1+, abs+, k3+: the value of the estimate, with the gradient of k2 (which is d, also beyond the clamps). In a loss,
    k1's own gradient has mean 0 whatever the policy, and k3's is not the KL's.

    Args: both log-probs [B, T] nats; mask [B, T] bool.
    Returns: [B, T] nats; 0 where mask is False, even if the inputs there are not finite.
    Raises: ShapeError when the shapes differ; KeyError for an unknown estimator.
    Source: J. Schulman, "Approximating KL divergence", 2020.
    """
    check_same_shape(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs, mask=mask)
    difference = torch.where(mask, policy_logprobs - ref_logprobs, 0.0)
    value = _ESTIMATORS[estimator.removesuffix("+")](difference)
    if estimator.endswith("+"):
        k2 = _ESTIMATORS["k2"](difference)
        return value.detach() + k2 - k2.detach()
    return value


def importance_weighted(kl: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """r x kl per token, with r = exp(policy - old), which carries gradient as well.

    The mean of r x k3 (or r x k1) over tokens that the old policy sampled is the KL of the current one, and the mean of its
    gradient is the KL's; without r both are biased as soon as the policy has moved, and k3's gradient is biased at once.

    Args: kl [B, T] nats, an estimate of token_kl; log-probs [B, T] nats; mask [B, T] bool. The log-ratio is clamped to
        [-20, 20] against overflow.
    Returns: [B, T] nats; 0 where mask is False.
    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1 (TRL: use_bias_correction_kl).
    """
    return torch.where(mask, log_ratio(policy_logprobs, old_logprobs, mask).exp() * kl, 0.0)


def _k3(difference: Tensor) -> Tensor:
    inverse = (-difference).clamp(-20.0, 20.0)
    return (inverse.exp() - 1 - inverse).clamp(max=10.0)


_ESTIMATORS = {
    "k1": lambda difference: difference,
    "abs": lambda difference: difference.abs(),
    "k2": lambda difference: difference.square() / 2,
    "k3": _k3,
}
