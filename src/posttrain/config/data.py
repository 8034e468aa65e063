"""Settings of prompts: their files, columns and truncation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from posttrain.config.curriculum import CurriculumConfig
from posttrain.config.domains import DomainConfig
from posttrain.config.images import ImageSettings

TemplatedPrompts = Literal["error", "raw", "wrap"]


class DataConfig(ImageSettings):
    train_files: list[str] = []
    """Training files (.parquet, .jsonl, .json, .csv, .arrow), read in order and concatenated; or data sets of the hub, such as
    org/name:train (docs/hub.md). Empty where environment.train_episodes generates episodes."""
    validation_files: list[str] = []
    """Files of held-out prompts in the same format."""
    prompts_per_step: int = Field(default=8, ge=1, le=1_000_000)
    """Prompts drawn for each step."""
    domains: dict[str, DomainConfig] = {}
    """Kinds of rows with a fixed number of prompts in every step, by name; empty draws from all rows as they come."""
    curriculum: CurriculumConfig | None = None
    """Shares of the data sources (of generated episodes: of the named environments) that follow their success rates; null
    draws from all rows as they come, or by domains."""
    domain_statistics: bool = False
    """Normalise rewards by the batch, and whiten rewards and advantages, over each domain's part of a step instead of the
    whole step."""
    prompt_column: str | None = None
    """Column with the prompt: a list of chat messages, or a string (taken as one user message); null means the first of
    prompt and messages that the file has."""
    data_source_column: str | None = None
    """Column that names the task; metrics are split by it. null means the first of data_source, tag and env_class that the
    file has."""
    ground_truth_column: str | None = None
    """Column with the reference answer; a dot reaches into a nested column. null means the first of
    reward_model.ground_truth, reward_spec.ground_truth, ground_truth and answer that the file has."""
    extra_info_column: str = "extra_info"
    """Column handed to reward functions as it is; may be absent."""
    extra_columns: list[str] = []
    """Further columns that reward functions and environments read: they are put into what the extra information holds, under
    their names; may be absent. [*] means all columns, and the file may then have no reference answer."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longest prompt, in tokens, after the chat template; an image counts as many tokens as the model reads for it."""
    overlong_prompts: Literal["error", "filter", "truncate_left", "truncate_right", "truncate_middle"] = "error"
    """Handling of longer prompts: stop with their rows, drop them, or cut (left keeps the end, right keeps the start). A
    prompt with images is never cut: with truncate_… one that is too long stops the run."""
    templated_prompts: TemplatedPrompts = "error"
    """Handling of prompts whose text holds the markers of a chat template: stop with their rows; raw, tokenize the text of every
    prompt as it is, without the chat template (each is one message); or wrap, apply the template around the markers."""
    dataset_class_file: str | None = None
    """Python file, or pkg://package.module, with a dataset class of your own; null reads the files as described above."""
    dataset_class_name: str | None = None
    """Name of that class; its items are mappings with verl's field names (docs/own-classes.md)."""
    dataset_class_options: dict[str, Any] = {}
    """The mapping that dataset and sampler classes of your own get as their config."""
    sampler_class_file: str | None = None
    """Python file, or pkg://package.module, with a sampler class of your own, which chooses the order of the training prompts."""
    sampler_class_name: str | None = None
    """Name of that class."""
    class_timeout_s: float = Field(default=1800.0, gt=0.0)
    """Time that a dataset class may take to read its files, and to give 256 of its rows."""
    filter_workers: int = Field(default=1, ge=1, le=10_000)
    """Processes that tokenize the dataset when it is opened."""
    shuffle: bool = True
    """Draw prompts in a new seeded order each epoch; false keeps the file order."""
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Seed of that order; null means run.seed."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Use only the first so many training prompts; null means all."""
    chat_template_options: dict[str, str | int | float | bool | None] = {}
    """Extra variables for the chat template, such as enable_thinking."""
    source_template_options: dict[str, dict[str, str | int | float | bool | None]] = {}
    """The same for prompts of single data sources, by name, in place of chat_template_options; chat_template among them is the
    text of a Jinja template for these prompts. Environments of several turns do not read it."""

    @field_validator("train_files", "validation_files", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value
