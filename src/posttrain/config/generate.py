"""GenerateConfig: responses to the prompts of a file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from posttrain.config.base import Section
from posttrain.config.data import TemplatedPrompts
from posttrain.config.images import ImageSettings
from posttrain.config.model import ModelConfig
from posttrain.config.placement import PlacementConfig
from posttrain.config.rollout import RolloutConfig


class GenerateDataConfig(ImageSettings):
    files: list[str]
    """Files with prompts (.parquet, .jsonl, .json, .csv, .arrow), read in order and concatenated; all their columns are kept."""
    prompt_column: str | None = None
    """Column with the prompt: a list of chat messages, or a string (taken as one user message); null means the first of
    prompt and messages that the file has."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longest prompt, in tokens, after the chat template."""
    overlong_prompts: Literal["error", "truncate_left", "truncate_right", "truncate_middle"] = "error"
    """Handling of longer prompts: stop with their rows, or cut (left keeps the end, right keeps the start). A prompt with
    images is never cut: one that is too long stops the run."""
    templated_prompts: TemplatedPrompts = "error"
    """Handling of prompts whose text holds the markers of a chat template: stop with their rows; raw, tokenize the text of every
    prompt as it is, without the chat template (each is one message); or wrap, apply the template around the markers."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Use only the first so many rows; null means all."""
    chat_template_options: dict[str, str | int | float | bool | None] = {}
    """Extra variables for the chat template, such as enable_thinking."""

    @field_validator("files", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class GenerateOutputConfig(Section):
    file: str
    """Parquet file that is written when all rows are done: the input's columns and the responses."""
    column: str = "responses"
    """The column of the output with the responses, a list of texts per row."""
    rows_per_part: int = Field(default=64, ge=1)
    """Rows that are sampled together and saved together; what is lost by a stop is at most one such part."""


class GenerateRunSection(Section):
    seed: int = Field(default=1, ge=0, lt=2**32)
    """Seed of the sampling; with a row's place and the sample's number it fixes every response."""


class GenerateConfig(Section):
    """One generation: a file of prompts becomes a file of prompts and responses."""

    model: ModelConfig
    """The model that is sampled from."""
    data: GenerateDataConfig
    """Prompts."""
    output: GenerateOutputConfig
    """Destination of the responses."""
    run: GenerateRunSection = GenerateRunSection()
    """Seed."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of the responses."""
    placement: PlacementConfig = PlacementConfig()
    """Devices."""
