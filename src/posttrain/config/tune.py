"""TuneConfig: learning from preferences, or a reward model, on rows of a file."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from posttrain.config.algorithm import AlgorithmSection
from posttrain.config.base import Section
from posttrain.config.images import ImageSettings
from posttrain.config.sft import SftConfig, TextDataConfig
from posttrain.registry import TUNE_METHODS, Registry


class TuneMethodConfig(AlgorithmSection):
    registry: ClassVar[Registry[Any]] = TUNE_METHODS

    name: str = "dpo"
    """Method: a built-in one (docs/tune.md), or, with path, the name of your function in that file."""

    @property
    def paired(self) -> bool:
        """True when the method compares two completions of a prompt."""
        return any(name.startswith("chosen_") for name in self.about.inputs)

    @property
    def scored(self) -> bool:
        """True when the method trains a head of one number, instead of the language model's."""
        return any(name.endswith("_scores") for name in self.about.inputs)

    @property
    def labelled(self) -> bool:
        """True when the method learns single completions that are good or bad."""
        return "desirable" in self.about.inputs

    @property
    def needs_reference(self) -> bool:
        """True when the method reads log-probs of a frozen reference."""
        return any(name.startswith("ref_") for name in self.about.inputs)

    @property
    def needs_kl(self) -> bool:
        """True when the method reads the KL to the reference on completions of other prompts."""
        return "kl" in self.about.inputs and self.settings.get("reference_point") != "zero"


class TuneDataConfig(TextDataConfig, ImageSettings):
    sequences_per_step: int = Field(default=32, ge=1)
    """Sequences of each step, which is one update (optimizer step): a row with one completion is one, a pair is two."""
    chosen_column: str | None = None
    """Pairs: column with the better completion, a text or a list of chat messages; null means chosen."""
    rejected_column: str | None = None
    """Pairs: column with the worse completion; null means rejected."""
    label_column: str | None = None
    """Single completions: column with true for a good one and false for a bad one (also 1 and 0); null means label."""
    margin_column: str | None = None
    """Pairs, for methods that read margins: column with the number by which the chosen side is better; null means margin, where
    the file has it."""
    reference_columns: list[str] | None = Field(default=None, min_length=1, max_length=2)
    """Columns with the reference's log-probs of whole completions, nats: of the chosen and the rejected side, or of the single
    completion. With them no reference is loaded. null: the reference scores the rows."""


class TuneReferenceConfig(Section):
    path: str | None = None
    """Frozen model that the policy is compared with; null means the policy's starting weights."""
    precompute: bool = False
    """Score all rows before the run begins, or resumes; false scores the rows of every step. On one device the reference is
    out of memory then; with several it stays loaded, with offload in CPU memory."""
    sequences_per_micro_batch_per_device: int = Field(default=32, ge=1)
    """Sequences per forward pass without gradient."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Cut those passes by this many tokens per device instead of by count; null cuts by count."""
    offload: bool = False
    """Keep its weights in CPU memory except while it scores a step; for accelerators."""
    engine_options: dict[str, Any] = {}
    """Options for the reference's engine, as policy.engine_options."""
    devices: list[int] | None = None
    """Devices of the reference, by number; null means all."""


class TuneConfig(SftConfig):
    """One run that tunes a model on preferences, or trains a reward model."""

    data: TuneDataConfig  # type: ignore[assignment]  # the two sections of data have a base in common
    """Completions to learn from."""
    method: TuneMethodConfig = TuneMethodConfig()
    """The loss, with its settings."""
    reference: TuneReferenceConfig = TuneReferenceConfig()
    """The frozen model that some methods compare the policy with."""

    @property
    def rows_per_step(self) -> int:
        """Rows of the files in a step."""
        return self.data.sequences_per_step // (2 if self.method.paired else 1)

    @property
    def runs_reference(self) -> bool:
        """True when a reference scores rows in this run."""
        return self.method.needs_reference and self.data.reference_columns is None

    @property
    def scores_before(self) -> bool:
        """True when the reference scores all rows before the first step."""
        return self.runs_reference and self.reference.precompute
