"""From logits to a drawn token and its log-prob."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from posttrain.records.trajectories import SamplingParams


def uniforms(seed: int, sample_id: str, count: int) -> np.ndarray:
    """The random numbers of one response, [count] in [0, 1): number t draws token t.

    A function of the seed and the sample's name alone, so a response does not depend on what shares its batch.
    """
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def draw(logits: Tensor, random: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    The logits are divided by the temperature, then cut by top-k, top-p and min-p in this order, each judging what the
    previous one left. The log-prob is that of the distribution drawn from, after these cuts. At temperature 0 the most
    likely token is taken and its log-prob is that of temperature 1, uncut.

    Args: logits [B, vocabulary]; random [B] float in [0, 1).
    Returns: tokens [B] int64, logprobs [B] float32 nats; NaN where a row holds NaN or inf.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=1)
        return tokens, _logprob(logits, tokens)
    kept = restrict(logits / sampling.temperature, sampling)
    # Inverse of the cumulative distribution. Its last entry stands for 1, which takes the rounding of the sum out; staying
    # just below it, with right=True, never lands on a token of probability 0.
    cumulative = kept.softmax(dim=1).cumsum(dim=1)
    total = cumulative[:, -1:]
    points = torch.minimum(random.to(total)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, points, right=True).squeeze(1)
    tokens = tokens.clamp(max=logits.shape[1] - 1)  # among NaN the search runs off the end
    return tokens, _logprob(kept, tokens)


def restrict(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Logits with the tokens that top-k, top-p and min-p forbid at -inf. The most likely token always stays."""
    if 0 < sampling.top_k < logits.shape[1]:
        smallest = logits.topk(sampling.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        sorted_logits, order = logits.sort(
            dim=1, descending=True, stable=True
        )  # probabilities may tie where logits do not
        ordered = sorted_logits.softmax(dim=1)
        before = ordered.cumsum(dim=1) - ordered  # probability of everything more likely
        forbidden = torch.zeros_like(ordered, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        logits = logits.masked_fill(forbidden, -torch.inf)
    if sampling.min_p > 0:
        probabilities = logits.softmax(dim=1)
        weakest = sampling.min_p * probabilities.amax(dim=1, keepdim=True)
        logits = logits.masked_fill(probabilities < weakest, -torch.inf)
    return logits


def _logprob(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(dim=1)
