"""A prompt: one dataset row, tokenised once, and what is needed to score an answer to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.records.images import PromptImages


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    prompt_id: str  # file name and row, e.g. "train.parquet:17"; unique within a dataset
    token_ids: tuple[int, ...]  # after the chat template and the overlong rule; what the model reads
    text: str  # the same, as text
    data_source: str  # task name; metrics are split by it
    ground_truth: Any = None  # reference answer, as the dataset holds it
    # Handed to reward functions untouched
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    # The conversation before the template, whole even where token_ids were cut.
    messages: tuple[Mapping[str, Any], ...] = ()
    images: PromptImages | None = None  # token_ids hold their tokens, as many as the model reads; None: text only
