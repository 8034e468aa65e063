"""Corrections for a sampler whose log-probs are not the trainer's: weights on the token loss, and tokens left out of it."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from posttrain.algos.ratio import LOG_RATIO_LIMIT, log_ratio, row_mean, run_mean
from posttrain.records.computed_tensors import by_rows

LEVELS = ("token", "sequence", "sequence_mean", "turn")


def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str,
    high: float,
    low: float | None = None,
    normalize: bool = False,
) -> Tensor:
    """w = pi_old / pi_rollout for each token, or of its response or turn; bounded, to multiply the token loss with.

    Levels: token; sequence, the product over the response; sequence_mean, its geometric mean; turn, the geometric mean over the
    tokens that were sampled without a break.

    Without ``low``, w is cut to ``high`` (truncated importance sampling). With it, w is 0 outside [low, high] (IcePop).
    normalize divides by the mean of the bounded weights, over tokens or over responses with a token, of all rows given
    here: call it on a whole step.

    Args: log-probs [B, T] nats, the trainer's and the sampler's of the same weights; mask [B, T] bool; one of the
        levels; high >= low > 0. Log-ratios are clamped to [-20, 20].
    Returns: [B, T] without gradient; 0 where mask is False.
    Raises: KeyError for an unknown level.
    Source: "Your efficient RL framework secretly brings you off-policy RL training", 2025 (truncation); IcePop, 2025;
        means as in ROLL's train_infer_correction.
    """
    if level not in LEVELS:
        raise KeyError(f"unknown level {level!r}")
    bounded = partial(_bounded_weights, level=level, high=high, low=low)
    dtype = torch.promote_types(old_logprobs.dtype, rollout_logprobs.dtype)
    weights = by_rows(bounded, old_logprobs, rollout_logprobs, mask, dtype=dtype)
    if normalize:
        rows = mask.any(dim=1)
        mean = weights[mask].mean() if level == "token" else row_mean(weights, mask)[rows].mean()
        weights = weights / mean if mean > 0 else weights
    return weights


def _bounded_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, level: str, high: float, low: float | None
) -> Tensor:
    """The weights of rows, [B, T]; see ``importance_weights``."""
    log_w = log_ratio(old_logprobs.detach(), rollout_logprobs, mask)
    if level == "sequence":
        log_w = log_w.sum(dim=1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expand(mask.shape)
    elif level == "sequence_mean":
        log_w = row_mean(log_w, mask).expand(mask.shape)
    elif level == "turn":
        log_w = run_mean(log_w, mask)
    weights = log_w.exp()
    if low is None:
        weights = weights.clamp(max=high)
    else:
        weights = torch.where((weights >= low) & (weights <= high), weights, 0.0)
    return torch.where(mask, weights, 0.0)


def rejection_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    statistic: str,
    reduction: str,
    high: float,
    low: float | None = None,
) -> Tensor:
    """The tokens that stay in the loss: those whose log-prob gap, or whose response's, is within bounds.

    With d = old - rollout, the statistic is k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d or difference = pi_old - pi_rollout, of
    the token, or its sum, mean or maximum over the response, or its mean over the turn (tokens sampled without a break); m2
    of a step is ``second_moment_mask``. k1 has two bounds, written as ratios: log low <= k1 <= log high, where a missing low
    is 1 / high. difference has two, where a missing low is -high. sequence_max asks this of every token of the response. k2
    and k3 must be at most high (nats).

    Args: log-probs [B, T] nats; mask [B, T] bool. d is clamped to [-20, 20].
    Returns: [B, T] bool, a part of mask. Several rules are combined with &.
    Raises: KeyError for an unknown statistic or reduction.
    Source: verl 0.9's rollout_rs; SkyRL's sequence, outlier and token masks are cases of k1 (with the bounds turned
        round, as theirs are on old / rollout); difference and the mean over a turn are ROLL's.
    """
    d = log_ratio(old_logprobs.detach(), rollout_logprobs, mask)
    if (statistic, reduction) == ("m2", "step"):
        return second_moment_mask(d, mask, high)
    if statistic == "difference":
        values = torch.where(mask, old_logprobs.detach().exp() - rollout_logprobs.exp(), 0.0)
    else:
        values = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[statistic]
    if reduction == "sequence_sum":
        values = values.sum(dim=1, keepdim=True)
    elif reduction == "sequence_mean":
        values = row_mean(values, mask)
    elif reduction == "turn_mean":
        values = run_mean(values, mask)
    elif reduction not in ("token", "sequence_max"):
        raise KeyError(f"unknown reduction {reduction!r}")
    if statistic == "k1":
        lowest = -math.log(high) if low is None else math.log(low)
        within = (values >= lowest) & (values <= math.log(high))
    elif statistic == "difference":
        within = (values >= (-high if low is None else low)) & (values <= high)
    else:
        within = values <= high
    if reduction == "sequence_max":
        within = (within | ~mask).all(dim=1, keepdim=True)
    return mask & within


def second_moment_mask(log_ratios: Tensor, mask: Tensor, high: float) -> Tensor:
    """The tokens that stay when those with the largest squared log-ratio go until the mean square of the rest is at most high.

    By hand, high = 0.02: squares 0.09, 0.04, 0.01, 0 have the mean 0.035; without 0.09 it is 0.0167, so one token goes.

    Args: log_ratios [B, T] nats; mask [B, T] bool, of a whole step.
    Returns: [B, T] bool, a part of mask.
    Source: M2PO, arXiv:2510.01161, on all tokens, as AReaL applies it (the paper spares those that clipping would not touch).
    """
    squares = log_ratios[mask].double().square()
    order = squares.argsort(descending=True, stable=True)
    rest = squares[order].flip(0).cumsum(0).flip(0) / torch.arange(len(squares), 0, -1, device=squares.device)
    gone = int((rest > high).sum())  # the mean of the rest falls with every token that goes
    kept = torch.ones_like(squares, dtype=torch.bool)
    kept[order[:gone]] = False
    result = torch.zeros_like(mask)
    result[mask] = kept
    return result
