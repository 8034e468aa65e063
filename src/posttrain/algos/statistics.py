"""Statistics over the entries that a mask selects. What stands behind the mask, finite or not, has no part in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape
from posttrain.records.computed_tensors import by_rows, of_each_row


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

    Sums are of float64, first over each row and then over the rows, so that processes that share out the rows get the same bits.

    Args: values [B, T] or [T], any float dtype; mask bool, the same shape; keep_mean adds the mean back.
    Returns: the shape of values; 0 where mask is False.
    """
    check_same_shape(values=values, mask=mask)
    if values.ndim == 1:
        return whiten(values[None], mask[None], keep_mean=keep_mean)[0]
    if not values.numel():
        return values
    found = of_each_row(_counts_and_sums, values, mask)
    used = found[found[:, 0] > 0]
    count = int(used[:, 0].sum())
    if count < 2:
        return by_rows(_kept, values, mask, dtype=values.dtype)
    mean = float(used[:, 1].sum()) / count
    scale = 0.0
    if used[:, 2].min() != used[:, 3].max():
        squares = of_each_row(partial(_squares, mean=mean), values, mask)
        scale = (float(squares.sum()) / (count - 1) + 1e-8) ** -0.5
    back = mean if keep_mean else 0.0
    return by_rows(partial(_scaled, mean=mean, scale=scale, back=back), values, mask, dtype=values.dtype)


def _counts_and_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Tokens of each row, their sum, the smallest and the largest, [B, 4] float64."""
    kept = values.double()
    return torch.stack(
        [
            mask.sum(dim=1).double(),
            torch.where(mask, kept, 0.0).sum(dim=1),
            torch.where(mask, kept, torch.inf).amin(dim=1),
            torch.where(mask, kept, -torch.inf).amax(dim=1),
        ],
        dim=1,
    )


def _squares(values: Tensor, mask: Tensor, *, mean: float) -> Tensor:
    """The sum of squared distances from the mean in each row, [B, 1] float64."""
    return torch.where(mask, (values.double() - mean).square(), 0.0).sum(dim=1, keepdim=True)


def _scaled(values: Tensor, mask: Tensor, *, mean: float, scale: float, back: float) -> Tensor:
    """(x - mean) x scale + back where the mask is True, [B, T]; with scale 0 exactly ``back``."""
    scaled = (values - mean) * scale if scale else torch.zeros_like(values)
    return torch.where(mask, scaled + back if back else scaled, 0.0)


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)


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

    Args: values and returns [B, T] or [T], reward units; mask bool, the same shape.
    Returns: None where the returns do not vary, so that there is nothing to explain.
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    if values.ndim == 1:
        return explained_variance(values[None], returns[None], mask[None])
    found = of_each_row(_returns_and_errors, values, returns, mask)
    found = found[found[:, 0] > 0]
    if not len(found) or found[:, 3].min() == found[:, 4].max():
        return None
    count = found[:, 0].sum()
    squares = of_each_row(
        partial(
            _squared_errors, returns_mean=float(found[:, 1].sum() / count), error_mean=float(found[:, 2].sum() / count)
        ),
        values,
        returns,
        mask,
    )
    whole, errors = squares.sum(dim=0).tolist()
    return 1 - errors / whole if whole > 0 else None


def _returns_and_errors(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Tokens of each row, the sums of returns and of returns - values, the smallest and the largest return, [B, 5] float64."""
    counts, sums, least, most = _counts_and_sums(returns, mask).unbind(dim=1)
    errors = torch.where(mask, returns.double() - values.double(), 0.0).sum(dim=1)
    return torch.stack([counts, sums, errors, least, most], dim=1)


def _squared_errors(values: Tensor, returns: Tensor, mask: Tensor, *, returns_mean: float, error_mean: float) -> Tensor:
    """The sums of squared distances of returns, and of returns - values, from their means in each row, [B, 2] float64."""
    errors = returns.double() - values.double()
    return torch.cat([_squares(returns, mask, mean=returns_mean), _squares(errors, mask, mean=error_mean)], dim=1)


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
