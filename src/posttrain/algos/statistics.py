"""Statistics over the entries that a mask selects. What stands behind the mask, finite or not, has no part in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    found = Moments.of(of_each_row(moments_of_rows, values, mask))
    if found.count < 2:
        return by_rows(_kept, values, mask, dtype=values.dtype)
    scale = 0.0 if found.all_equal else (found.squares / (found.count - 1) + 1e-8) ** -0.5
    back = found.mean if keep_mean else 0.0
    return by_rows(partial(_scaled, mean=found.mean, scale=scale, back=back), values, mask, dtype=values.dtype)


def moments_of_rows(values: Tensor, mask: Tensor) -> Tensor:
    """Count the masked-in entries of each row; their mean, the sum of their squared distances from it, the smallest and the
    largest, [B, 5] float64; see Moments."""
    kept, counts = values.double(), mask.sum(dim=1).double()
    means = torch.where(mask, kept, 0.0).sum(dim=1) / counts.clamp(min=1.0)
    squares = torch.where(mask, (kept - means[:, None]).square(), 0.0).sum(dim=1)
    ends = torch.where(mask, kept, torch.inf).amin(dim=1), torch.where(mask, kept, -torch.inf).amax(dim=1)
    return torch.stack([counts, means, squares, *ends], dim=1)


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared distances from it, over the masked-in entries of all rows."""

    count: int
    mean: float
    squares: float
    all_equal: bool

    @classmethod
    def of(cls, rows: Tensor) -> Moments:
        """Add up ``moments_of_rows`` [B, 5].

        Source: T. F. Chan et al., "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
        """
        counts, means, squares, least, most = rows[rows[:, 0] > 0].unbind(dim=1)
        count = int(counts.sum())
        mean = float((counts * means).sum()) / max(count, 1)
        between = counts * (means - mean).square()
        return cls(count, mean, float((squares + between).sum()), bool(count) and bool(least.min() == most.max()))


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


@dataclass(frozen=True, slots=True)
class ValueFit:
    """The fit of a critic's values to the returns, over all masked-in entries; 0 where there are none."""

    values_mean: float
    returns_mean: float
    # 1 - variance(returns - values) / variance(returns): 1 is a perfect critic, 0 one that knows no more than the mean, below 0
    # one that is worse. A constant error does not lower it. None where the returns do not vary: there is nothing to explain.
    explained_variance: float | None


def value_fit(values: Tensor, returns: Tensor, mask: Tensor, found: Tensor | None = None) -> ValueFit:
    """Compare values with returns.

    Args: values and returns [B, T], reward units; mask [B, T] bool; found, ``returns_and_errors`` of them where it is known.
    """
    found = of_each_row(returns_and_errors, values, returns, mask) if found is None else found
    whole, errors = Moments.of(found[:, :5]), Moments.of(found[:, 5:])
    varies = whole.squares > 0 and not whole.all_equal
    explained = 1 - errors.squares / whole.squares if varies else None
    return ValueFit(whole.mean - errors.mean, whole.mean, explained)


def returns_and_errors(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """``moments_of_rows`` of the returns, and of returns - values, [B, 10] float64; see ``value_fit``."""
    check_same_shape(values=values, returns=returns, mask=mask)
    errors = returns.double() - values.double()
    return torch.cat([moments_of_rows(returns, mask), moments_of_rows(errors, mask)], dim=1)


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
