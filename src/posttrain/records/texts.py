"""Texts to learn, as token ids (supervised fine-tuning)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Text:
    """One row of a dataset."""

    name: str  # such as train.parquet:17
    token_ids: NDArray[np.int32]  # [n], n >= 2
    learned: NDArray[np.bool_]  # [n], the token enters the loss; never the first one, which nothing predicts
