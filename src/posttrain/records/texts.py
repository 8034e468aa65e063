"""Texts to learn, as token ids (supervised fine-tuning)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from posttrain.records.images import PromptImages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Text:
    """One row of a dataset."""

    name: str  # such as train.parquet:17
    source: str = ""  # of data.train_sources or data.validation_sources
    token_ids: NDArray[np.int32]  # [n], n >= 2
    learned: NDArray[np.bool_]  # [n], the token enters the loss; never the first one, which nothing predicts
    images: PromptImages | None = None  # of the prompt

    def with_prompt(self) -> Text:
        """Return the text with every token learned that one before it predicts."""
        learned = np.ones_like(self.learned)
        learned[0] = False
        return replace(self, learned=learned)
