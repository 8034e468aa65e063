"""The weight of a KL penalty over a run: fixed, or steered towards a target."""

from __future__ import annotations


def next_kl_coef(
    kl_coef: float, measured_kl: float, sequences: int, *, target_kl: float | None, horizon: int = 10_000
) -> float:
    """The coefficient for the next step, from the one that this step used.

    coef x (1 + clip(kl / target - 1, -0.2, 0.2) x sequences / horizon); without a target it stays.

    Args: measured_kl, nats per token; sequences of the step; target_kl > 0, nats per token; horizon, sequences.
    Source: arXiv:1909.08593, section 2.2.
    """
    if target_kl is None:
        return kl_coef
    error = min(max(measured_kl / target_kl - 1, -0.2), 0.2)
    return kl_coef * (1 + error * sequences / horizon)
