"""The tokens at which the policy was least certain: forks, of which there are few in a response."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape


def high_entropy_tokens(entropies: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """The ``share`` of the masked-in tokens with the highest entropy, over all rows; tokens that tie with the last of them stay.

    Args: entropies [B, T] nats; mask [B, T] bool; share in (0, 1], of which the number of tokens is rounded up.
    Returns: [B, T] bool, False where mask is False. A token whose entropy is not a number is never among them.
    Raises: ShapeError when the shapes differ.
    Source: "Beyond the 80/20 Rule", arXiv:2506.01939, equation 6 (TRL: top_entropy_quantile).
    """
    check_same_shape(entropies=entropies, mask=mask)
    kept = entropies[mask]
    if not len(kept):
        return mask
    # 0.2 x 5 is 1.0000000000000002 for some shares: a whole number of tokens stays that number.
    count = max(1, math.ceil(share * len(kept) - 1e-9))
    threshold = kept.nan_to_num(nan=-torch.inf).topk(count).values[-1]
    return mask & (entropies >= threshold)
