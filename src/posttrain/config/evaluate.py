"""EvaluateConfig: scoring responses that are in a file."""

from __future__ import annotations

from pydantic import Field, field_validator

from posttrain.config.base import Section
from posttrain.config.reward import RewardConfig, RewardTerm


class EvaluateDataConfig(Section):
    files: list[str]
    """Files with responses (.parquet, .jsonl, .json, .csv, .arrow), read in order and concatenated."""
    response_column: str = "responses"
    """Column with the responses of a prompt: a list of texts, or one text."""
    prompt_column: str | None = None
    """Column with the prompt, for the samples and for rewards that read it; null means the first of prompt and messages that
    the file has, if it has one."""
    data_source_column: str | None = None
    """Column that names the task; metrics are split by it. null means the first of data_source, tag and env_class that the
    file has."""
    ground_truth_column: str | None = None
    """Column with the reference answer; a dot reaches into a nested column. null means the first of
    reward_model.ground_truth, reward_spec.ground_truth, ground_truth and answer that the file has."""
    extra_info_column: str = "extra_info"
    """Column handed to reward functions as it is; may be absent."""
    extra_columns: list[str] = []
    """Further columns that reward functions read: they are put into what the extra information holds, under their names; may
    be absent."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Score only the first so many rows; null means all."""

    @field_validator("files", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class ScoringConfig(RewardConfig):
    terms: list[RewardTerm] = [RewardTerm(name="by_data_source")]
    """Reward terms; a response's score is their weighted sum."""


class MetricsConfig(Section):
    pass_score: float = 1.0
    """A response with at least this score is right: for accuracy and pass@k."""
    bootstrap_draws: int = Field(default=1000, ge=0, le=1_000_000)
    """Draws of the bootstrap behind the intervals; 0 gives none. Each takes 8 bytes per metric."""
    confidence: float = Field(default=0.95, gt=0.0, lt=1.0)
    """Confidence level of the intervals."""


class EvaluateOutputConfig(Section):
    folder: str | None = None
    """Folder for results.json, report.html and the samples; null means the first file's name with .evaluation behind it."""


class EvaluateRunSection(Section):
    name: str = "evaluation"
    """Name of the evaluation, shown in its report and beside others."""
    seed: int = Field(default=1, ge=0, lt=2**32)
    """Seed of the bootstrap."""


class EvaluateConfig(Section):
    """One evaluation: a file of responses becomes scores and metrics."""

    data: EvaluateDataConfig
    """Responses."""
    reward: ScoringConfig = ScoringConfig()
    """Scoring of the responses."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics computed from the scores."""
    output: EvaluateOutputConfig = EvaluateOutputConfig()
    """Destination of the results."""
    run: EvaluateRunSection = EvaluateRunSection()
    """Name and seed."""

    @property
    def folder(self) -> str:
        """The output folder."""
        return self.output.folder or (f"{self.data.files[0]}.evaluation" if self.data.files else "evaluation")
