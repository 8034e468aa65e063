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
    # Rows and columns of patches of each image, in a process that the images are not sent to; see patches_of_images.
    image_patches: tuple[tuple[int, int], ...] = ()


def patches_of_images(prompt: Prompt) -> tuple[tuple[int, int], ...]:
    """Rows and columns of patches of each image, as the model reads it; empty without images or a processor that counts them."""
    grids = None if prompt.images is None else prompt.images.features.get("image_grid_thw")
    if grids is None:
        return prompt.image_patches
    return tuple((int(rows), int(columns)) for _, rows, columns in grids)
