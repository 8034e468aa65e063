"""Made-up texts and prompts of full length, as dataset classes (data.dataset_class_file=pkg://posttrain.data.full_length).

A run of a few steps on them shows whether the longest step that real data can bring fits, and how long it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FullLengthTexts:
    """``rows`` texts of ``tokens`` random tokens each, of which all are learned; the same in every run.

    Args: config, the mapping ``rows`` and ``tokens`` (data.dataset_class_options); no file is read.
    """

    def __init__(self, parquet_files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any]):
        self._vocabulary = len(tokenizer)
        self._rows, self._tokens = int(config["rows"]), int(config["tokens"])

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = np.random.default_rng(index).integers(0, self._vocabulary, self._tokens)
        return {"input_ids": ids, "loss_mask": np.ones(self._tokens, dtype=bool)}


class FullLengthPrompts:
    """``rows`` prompts of ``tokens`` random tokens each, for reinforcement learning; the same in every run.

    Args: config, the mapping ``rows`` and ``tokens`` (data.dataset_class_options); no file is read.
    """

    def __init__(self, data_files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any]):
        self._vocabulary = len(tokenizer)
        self._rows, self._tokens = int(config["rows"]), int(config["tokens"])

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = np.random.default_rng(index).integers(0, self._vocabulary, self._tokens)
        return {"raw_prompt_ids": ids.tolist(), "data_source": "full_length", "extra_info": {"index": index}}
