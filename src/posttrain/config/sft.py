"""SftConfig: supervised fine-tuning on responses that are in a file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from posttrain.config.base import Section
from posttrain.config.checkpoint import CheckpointConfig
from posttrain.config.distillation import TextDistillationConfig
from posttrain.config.model import ModelConfig
from posttrain.config.placement import PlacementConfig
from posttrain.config.policy import LearnerConfig, OptimizerConfig, ScheduleConfig
from posttrain.config.profiling import ProfilingConfig
from posttrain.config.run import RunSection
from posttrain.config.tracking import TrackingConfig


class TextDataConfig(Section):
    """Rows of texts, as SFT and learning from preferences read them."""

    train_files: list[str]
    """Training files (.parquet, .jsonl, .json, .csv, .arrow; a folder means those in it), read in order and concatenated; or
    data sets of the hub, such as org/name:train (docs/hub.md). A slice of rows may follow: train.parquet[200:240], or [:10%]."""
    validation_files: list[str] = []
    """Files of held-out rows in the same format."""
    sequences_per_step: int = Field(default=32, ge=1)
    """Rows of each step, which is one update (optimizer step)."""
    messages_column: str | None = None
    """Column with whole conversations, a list of chat messages; null means messages, where the file has it and no column
    for prompt or response is named."""
    prompt_column: str | None = None
    """Column with the prompt: a text (taken as one user message) or a list of chat messages; a dot reaches into a nested
    column. null means the first of prompt and question that the file has."""
    response_column: str | None = None
    """Column with the response, a text; a dot reaches into a nested column. null means the first of response and answer
    that the file has."""
    query_column: str | None = None
    """Column with more of the prompt, a text that follows it on a new line; empty or null in a row adds nothing. Needs a
    column of texts for the prompt."""
    system_column: str | None = None
    """Column with the system message of a prompt, a text; empty or null in a row means none. Of conversations: for those that
    begin with none of their own; may be absent."""
    tools_column: str = "tools"
    """Conversations: column with the tools that the chat template shows, a list or its JSON text; may be absent."""
    enable_thinking_column: str = "enable_thinking"
    """Conversations: column with the chat template's variable of this name; may be absent."""
    train_on: Literal["all_turns", "last_turn"] = "all_turns"
    """Conversations: which of the assistant's messages are learned; all others are read only."""
    max_tokens: int = Field(default=1024, ge=2)
    """Longest sequence, in tokens, after the chat template."""
    overlong: Literal["error", "filter", "truncate_left", "truncate_right"] = "error"
    """Handling of longer rows: stop with their rows, drop them, or cut (left keeps the end, right keeps the start)."""
    tokenize_workers: int = Field(default=1, ge=1, le=10_000)
    """Processes that tokenize the dataset when it is opened."""
    shuffle: bool = True
    """Draw rows in a new seeded order each epoch; false keeps the file order."""
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Seed of that order; null means run.seed."""
    max_rows: int | None = Field(default=None, ge=1)
    """Use only the first so many training rows; null means all."""
    chat_template_options: dict[str, str | int | float | bool | None] = {}
    """Extra variables for the chat template."""
    dataset_class_file: str | None = None
    """Python file with a dataset class of your own (docs/sft.md), which then reads the files; null reads them here."""
    dataset_class_name: str | None = None
    """Name of that class."""
    dataset_class_options: dict[str, Any] = {}
    """The config passed to that class."""
    dataset_class_mask: Literal["tokens", "predictions"] = "tokens"
    """Positions marked by its loss_mask: the learned tokens, or the positions before them, which predict them (verl)."""

    @field_validator("train_files", "validation_files", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class SftDataConfig(TextDataConfig):
    train_sources: list[str] = []
    """Name of the source of each training file, in order; files may share one. Empty names none."""
    source_weights: dict[str, float] = {}
    """Share of each of train_sources in what is drawn, whatever its size; they need not add up to 1. Rows are then drawn with
    replacement, as many in an epoch as there are rows; empty draws each row once an epoch."""
    validation_sources: list[str] = []
    """Name of the source of each validation file, in order; the loss of each is a metric besides that of all."""
    train_tokenized: bool = False
    """The training files hold tokens, not texts: input_ids, without padding, and loss_mask, 1 for those that are learned."""
    validation_tokenized: bool = False
    """The same of the validation files."""

    @field_validator("source_weights")
    @classmethod
    def _weights_are_shares(cls, value: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name, weight in value.items() if not 0 < weight < float("inf")]:
            raise ValueError(f"the weight of {wrong[0]} must be above 0, not {value[wrong[0]]}")
        return value


class SftPolicyConfig(LearnerConfig):
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Optimizer of the policy."""
    schedule: ScheduleConfig = ScheduleConfig(name="cosine", warmup_ratio=0.1)
    """Learning rate over the run."""
    schedule_over: Literal["run", "epochs"] = "run"
    """Length of warm-up and decay: the steps of the run, or all total_epochs, of which total_steps then covers only the
    beginning."""


class SftValidationConfig(Section):
    every_steps: int | None = Field(default=None, ge=1)
    """Validate after every so many steps, besides the ends; null means only at the ends."""
    each_epoch: bool = False
    """Validate after the last step of every epoch, too."""
    before_training: bool = True
    """Validate the starting weights."""
    after_training: bool = True
    """Validate after the last step."""
    max_rows: int | None = Field(default=None, ge=1)
    """Use only the first so many validation rows; null means all."""


class SftCheckpointConfig(CheckpointConfig):
    each_epoch: bool = False
    """Save after the last step of every epoch, too."""


class SftConfig(Section):
    """One run of supervised fine-tuning."""

    model: ModelConfig
    """The model that is trained."""
    data: SftDataConfig
    """Texts to learn."""
    run: RunSection = RunSection()
    """Name, folder, seed, length."""
    policy: SftPolicyConfig = SftPolicyConfig()
    """The update: optimizer, learning rate, micro-batches."""
    distillation: TextDistillationConfig = Field(default_factory=TextDistillationConfig)
    """Teachers whose distributions are learned besides, or instead of, the texts themselves."""
    validation: SftValidationConfig = SftValidationConfig()
    """The loss on held-out rows."""
    checkpoint: SftCheckpointConfig = SftCheckpointConfig()
    """Checkpoints."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics and trackers."""
    profiling: ProfilingConfig = ProfilingConfig()
    """Profiles of chosen phases of chosen steps."""
    placement: PlacementConfig = PlacementConfig()
    """Devices."""

    @property
    def folder(self) -> str:
        """The run folder."""
        return self.run.folder or f"runs/{self.run.name}"
