"""Settings of a layer's attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionSettings(NamedTuple):
    """Settings by which a layer's attention weighs keys."""

    scaling: float  # of the products
    window: int | None = None  # a query sees at most this many of the latest keys, itself included
    softcap: float | None = None  # c: scores x are replaced by c tanh(x / c) (Gemma 2)
    # [heads]: a score of each head that takes a share of the weights and adds nothing (gpt-oss)
    sinks: Tensor | None = None
