"""Clip-Cov: PPO's clipped loss without some of the tokens whose covariance drives the entropy down."""

from __future__ import annotations

import hashlib
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from posttrain.algos.covariance import need_whole_mini_batch, token_covariance
from posttrain.algos.losses.ppo_clip import clipped_surrogate
from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import NonNegative, Share


@POLICY_LOSSES.register("clip_cov", chooses_tokens=True)
def clip_cov(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    mini_batch_tokens: int,
    chosen: Tensor | None = None,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    covariance_share: Annotated[float, Field(gt=0, le=1)] = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss per token; of the unclipped tokens with covariance_low < covariance < covariance_high, some drop out.

    Up to max(1, covariance_share x tokens) of them are drawn at random and get loss 0, without gradient. The covariance
    (of advantage and log-prob, see token_covariance) and the draw are over the whole mini-batch: for a part of it they are made
    before (``choose``). The draw is seeded by the candidates' places: no state, so a resumed run draws the same.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool; mini_batch_tokens, the loss
        tokens of the mini-batch; chosen [B, T] bool, the tokens to drop, None where all of the mini-batch is here.
    Settings:
        clip_ratio_low: the ratio is clipped below at 1 - this.
        clip_ratio_high: the ratio is clipped above at 1 + this.
        covariance_share: largest share of a mini-batch's tokens that is dropped, but at least one token.
        covariance_low: only tokens with a covariance above this are dropped, in nats x advantage units.
        covariance_high: only tokens with a covariance below this are dropped.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: clip_fraction (1 where the token was drawn
        or the clipped branch won), ratio_mean, kl_old.
    Raises: RequestError when these are not all tokens of the mini-batch, and none are chosen.
    Source: arXiv:2505.22617.
    """
    if chosen is None:
        need_whole_mini_batch(mask, mini_batch_tokens, "clip_cov")
        bounds = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high}
        bounds |= {"covariance_low": covariance_low, "covariance_high": covariance_high}
        chosen = choose(policy_logprobs, old_logprobs, advantages, mask, covariance_share=covariance_share, **bounds)
    log_r = log_ratio(policy_logprobs, old_logprobs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    loss, report = clipped_surrogate(log_r.exp(), advantages, clip_ratio_low, clip_ratio_high)
    report["clip_fraction"] = (chosen | report["clip_fraction"].bool()).float()
    return torch.where(chosen, 0.0, loss), report | distance_report(log_r, mask)


def choose(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    covariance_share: float,
    covariance_low: float,
    covariance_high: float,
) -> Tensor:
    """The tokens [B, T] bool of a whole mini-batch that clip_cov drops. Arguments as there; no gradient."""
    log_r = log_ratio(policy_logprobs.detach(), old_logprobs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    clipped = clipped_surrogate(log_r.exp(), advantages, clip_ratio_low, clip_ratio_high)[1]["clip_fraction"].bool()
    covariance = token_covariance(policy_logprobs, advantages, mask)
    candidates = mask & ~clipped & (covariance > covariance_low) & (covariance < covariance_high)
    return _draw(candidates, max(1, int(covariance_share * int(mask.sum()))))


def _draw(candidates: Tensor, count: int) -> Tensor:
    """[B, T] bool: ``count`` of the candidates, or all when they are fewer."""
    seed = hashlib.blake2b(candidates.cpu().numpy().tobytes(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
    places = candidates.flatten().nonzero().squeeze(1)
    chosen = places[torch.randperm(len(places), generator=generator)[:count].to(places.device)]
    drawn = torch.zeros_like(candidates).flatten()
    drawn[chosen] = True
    return drawn.view_as(candidates)
