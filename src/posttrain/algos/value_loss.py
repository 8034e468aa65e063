"""Loss of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """max((v - R)^2, (clip(v, v_old - value_clip, v_old + value_clip) - R)^2) / 2 per token; null value_clip: the first alone.

    Args: values (carrying grad), old_values and returns [B, T], reward units; mask [B, T] bool.
    Returns: loss [B, T], 0 where mask is False, to be aggregated like a policy loss; and what to log, [B, T]:
        value_clip_fraction (1 where the clipped term was the larger).
    Source: arXiv:1707.06347's code.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values = torch.where(mask, values, 0.0), torch.where(mask, old_values, 0.0)
    returns = torch.where(mask, returns, 0.0)
    free = (values - returns).square()
    if value_clip is None:
        return free / 2, {"value_clip_fraction": torch.zeros_like(free).detach()}
    near = torch.maximum(torch.minimum(values, old_values + value_clip), old_values - value_clip)
    clipped = (near - returns).square()
    return torch.maximum(free, clipped) / 2, {"value_clip_fraction": (clipped > free).float()}
