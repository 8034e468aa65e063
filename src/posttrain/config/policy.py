"""The update of the policy: batch sizes, optimizer, learning rate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.config.base import Section
from posttrain.config.lora import LoraConfig

ONE_DEVICE = "local"  # the training engine of a whole model on one device
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerConfig(Section):
    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimizer; muon orthogonalises the momentum of hidden layers' matrices and treats the rest as adamw."""
    lr: float = Field(default=1e-6, gt=0.0, le=10.0)
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of AdamW's two running averages (adamw, muon)."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to AdamW's denominator (adamw, muon)."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Decay rate of the running sum of gradients (sgd, muon); null means 0 for sgd and 0.95 for muon."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Decoupled weight decay, on every weight; sgd adds it to the gradient."""
    weight_decay_end: float | None = Field(default=None, ge=0.0)
    """Weight decay at the end of the run, to which it moves; null keeps it as it is."""
    weight_decay_shape: Literal["linear", "cosine"] = "linear"
    """Shape of the change of weight decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Clip the global gradient norm to this; null does not clip."""
    offload: bool = False
    """Keep the running averages in CPU memory between updates; for accelerators."""


class ScheduleConfig(Section):
    name: Literal["constant", "cosine", "linear", "warmup_stable_decay", "inverse_square_root"] = "constant"
    """Shape of the learning rate after warm-up."""
    warmup_updates: int | None = Field(default=None, ge=0)
    """Updates (optimizer steps) of linear warm-up from 0; null means warmup_ratio."""
    warmup_ratio: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Warm-up as a share of all updates, used when warmup_updates is null."""
    warmup_rounding: Literal["down", "up"] = "down"
    """Rounding of warmup_ratio to a whole number of updates."""
    moves_every: Literal["update", "step"] = "update"
    """step: the updates of a step share one learning rate; warm-up and decay are then counted in whole steps."""
    warmup_start_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Learning rate at the first update of the warm-up, as a share of the peak."""
    decay_updates: int | None = Field(default=None, ge=1)
    """Update at which the floor is reached, warm-up included; null means the last of the run."""
    cycles: float = Field(default=0.5, gt=0.0)
    """cosine: whole waves between warm-up and end; 0.5 falls once from the peak to the floor."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """All but constant: the floor, as a share of the peak."""
    stable_ratio: float = Field(default=0.9, ge=0.0, le=1.0)
    """warmup_stable_decay: share of the updates after warm-up that stay at the peak."""
    decay: Literal["cosine", "linear", "exponential", "minus_sqrt", "constant"] = "cosine"
    """warmup_stable_decay: shape of the fall to the floor; constant does not fall."""
    counts_from: Literal[0, 1] = 0
    """Number of the first update; 1 gives a warm-up from 0 a rate above 0 in the first update, and ends it one update earlier."""
    from_checkpoint: bool = False
    """A resumed run keeps the schedule that its checkpoint was saved with (peak, shape, length, weight decay), whatever the
    configuration says now."""
    timescale_updates: int | None = Field(default=None, ge=1)
    """inverse_square_root: updates after the warm-up in which the rate falls to 0.71 of the peak; null: those of the warm-up."""


class LearnerConfig(Section):
    """Settings of every run that trains a policy."""

    engine: str = ONE_DEVICE
    """Training engine: local is one device; the others split a model over several (docs/scaling.md lists them)."""
    sequences_per_micro_batch_per_device: int = Field(default=8, ge=1)
    """Sequences per forward and backward pass. Changes memory and speed, never the result."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Cut micro-batches by this many tokens per device (prompts and responses) instead of by count; null cuts by count."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the weights; null trains all of them."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the policy."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over the run."""
    engine_options: dict[str, Any] = {}
    """Options for the training engine in its own words (docs/scaling.md lists them); the local engine reads none."""
    devices: list[int] | None = None
    """Devices of the policy, by number; null means all."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Devices that share one sequence; where they exchange heads (Ulysses) they must divide the attention heads."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices that share one layer's matrices."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Devices that share the layers."""


class PolicyConfig(LearnerConfig):
    epochs_per_step: int = Field(default=1, ge=1, le=10_000)
    """Passes over a step's sequences."""
    sequences_per_mini_batch: int | None = Field(default=None, ge=1)
    """Sequences per update (optimizer step); null means all of the step's."""
    smaller_last_mini_batch: bool = False
    """Let the last mini-batch of each pass hold what is left where their size does not divide the step's sequences, the critic's
    too; false refuses such sizes."""
    uneven_shares: bool = False
    """Let devices get one sequence more than others where their number does not divide those of a step or of a mini-batch, the
    critic's too; false refuses such sizes. Losses divide by counts over all devices, so shares change no number."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its responses. Changes speed and memory, never the result."""
    shuffle: bool = False
    """Draw the sequences of every mini-batch at random in each pass, instead of taking them in order; the rows of an episode stay
    together."""
    shuffle_seed: int | None = Field(default=None, ge=0)
    """Seed of these draws; null means run.seed."""
    routing_replay: bool = False
    """Every update sends the tokens of a mixture of experts to the experts that they had in the pass which computes old log-probs
    (R2), so that updates change weights and not the choice of experts; rollout.routing_replay takes the sampler's choice instead
    (R3)."""
