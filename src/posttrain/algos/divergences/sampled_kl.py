"""KL(student || teacher), estimated from the log-probs of the sampled tokens alone."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from posttrain.algos.kl import token_kl
from posttrain.registry import DIVERGENCES


@DIVERGENCES.register("sampled_kl", of_sampled_tokens=True)
def sampled_kl(
    policy_logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"] = "k1",
) -> Tensor:
    """The estimate of token_kl with the teacher as reference. k1 is an advantage: as a loss its gradient has mean 0.

    Args: log-probs [B, T] nats of the sampled tokens; mask [B, T] bool.
    Settings:
        estimator: k1 is log p - log q; the others, and the + behind them, as loss.kl_estimator.
    Returns: [B, T] nats; 0 where mask is False.
    Source: Thinking Machines, "On-policy distillation", 2025 (k1, as the negative advantage).
    """
    return token_kl(estimator, policy_logprobs, teacher_logprobs, mask)
