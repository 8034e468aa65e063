"""Statistics over the entries that a mask selects. What stands behind the mask, finite or not, has no part in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked-in entries, of any number of dimensions; 0 when there are none.

    Args: values, any float dtype; mask bool, the same shape.
    Returns: scalar, in the dtype of values.
    """
    check_same_shape(values=values, mask=mask)
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def masked_variance(values: Tensor, mask: Tensor) -> Tensor:
    """Sample variance (divided by n - 1) of the masked-in entries; 0 when there are fewer than two.

    Args: values, any float dtype; mask bool, the same shape.
    Returns: scalar, the unit of values squared.
    """
    squares = (values - masked_mean(values, mask)).square()
    return torch.where(mask, squares, 0.0).sum() / (mask.sum() - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, *, keep_mean: bool = False) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the masked-in entries, so that their mean is 0 and their variance 1.

    Entries that are all equal become exactly 0 (their rounded mean could differ from them, and the division would blow
    that up). A single entry has no spread to be measured in and stays as it is.

    Args: values, any float dtype; mask bool, the same shape; keep_mean adds the mean back.
    Returns: the shape of values; 0 where mask is False.
    """
    kept = values[mask]
    if len(kept) < 2:
        return torch.where(mask, values, 0.0)
    mean = masked_mean(values, mask)
    if (kept == kept[0]).all():
        whitened = torch.zeros_like(values)
    else:
        whitened = (values - mean) * (masked_variance(values, mask) + 1e-8).rsqrt()
    return torch.where(mask, whitened + mean if keep_mean else whitened, 0.0)


def whiten_parts(values: Tensor, mask: Tensor, part_index: Tensor | None) -> Tensor:
    """``whiten`` over the rows of each part by itself.

    Args: values and mask [B, T], as there; part_index [B] int64, equal for rows of a part, None: all rows together.
    Returns: [B, T]; 0 where mask is False.
    """
    if part_index is None:
        return whiten(values, mask)
    whitened = torch.zeros_like(values)
    for part in part_index.unique():
        rows = part_index == part
        whitened[rows] = whiten(values[rows], mask[rows])
    return whitened


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 - variance(returns - values) / variance(returns) over the masked-in entries: 1 is a perfect critic, 0 one that knows
    no more than the mean, below 0 one that is worse. A constant error does not lower it.

    Args: values and returns [B, T], reward units; mask [B, T] bool.
    Returns: None where the returns do not vary, so that there is nothing to explain.
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    whole = masked_variance(returns.double(), mask)
    if not whole > 0 or (returns[mask] == returns[mask][0]).all():
        return None
    return 1 - (masked_variance(returns.double() - values.double(), mask) / whole).item()


def reduced_by_name(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Several measurements of every metric as one: the largest where the name says max, the smallest where it says min, the
    mean of the others.

    Args: at least one measurement each.
    """
    reduced = {}
    for name, values in metrics.items():
        words = re.split(r"[/_@]", name)
        reduced[name] = max(values) if "max" in words else min(values) if "min" in words else sum(values) / len(values)
    return reduced
