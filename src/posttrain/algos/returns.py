"""Returns: the sum of the rewards on a token and the tokens after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.algos.shapes import check_same_shape


def returns_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_next, where next is the row's next masked-in token.

    Tokens that the policy did not sample (tool output, padding) are no steps of its own: they have no return, their
    reward is not counted, and the return is carried over them without a discount.

    Args: token_rewards [B, T]; mask [B, T] bool; gamma in [0, 1].
    Returns: [B, T] float64, reward units; 0 where mask is False.
    """
    check_same_shape(token_rewards=token_rewards, mask=mask)
    rewards, sampled = by_column(token_rewards), by_column(mask)
    running = np.zeros(rewards.shape[1])
    new = np.zeros_like(running)
    for reward, own in zip(rewards[::-1], sampled[::-1], strict=True):
        np.multiply(running, gamma, out=new)
        np.add(reward, new, out=new)
        np.putmask(running, own, new)
        reward[:] = running
    return torch.where(mask, from_columns(rewards, mask), 0.0)


def by_column(values: Tensor) -> NDArray[Any]:
    """Copy a tensor [B, T] to [T, B], as float64 or bool: a recurrence over columns, which no closed form without overflow
    replaces, reads neighbours in memory. On a few rows NumPy's single steps take a fifth of the time of torch's."""
    turned = values.detach().cpu().t().contiguous()
    kind = torch.bool if turned.dtype == torch.bool else torch.float64
    found: NDArray[Any] = turned.to(kind, copy=True).numpy()
    return found


def from_columns(values: NDArray[np.float64], like: Tensor) -> Tensor:
    """Turn ``by_column`` back: [T, B] to [B, T] float64, on the device of ``like``."""
    return torch.from_numpy(values).t().contiguous().to(like.device)
