"""RunConfig: the complete configuration of a run, immutable. Nothing after the dialects reads another configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from posttrain.config.algorithm import AdvantageConfig, LossConfig
from posttrain.config.asynchronous import AsynchronousConfig
from posttrain.config.base import Section
from posttrain.config.checkpoint import CheckpointConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.data import DataConfig
from posttrain.config.distillation import OnPolicyDistillationConfig
from posttrain.config.environment import SINGLE_TURN, EnvironmentConfig
from posttrain.config.group_filter import GroupFilterConfig
from posttrain.config.model import ModelConfig, ReferenceConfig
from posttrain.config.placement import PlacementConfig
from posttrain.config.policy import PolicyConfig
from posttrain.config.profiling import ProfilingConfig
from posttrain.config.resampling import ResamplingConfig
from posttrain.config.reward import RewardConfig
from posttrain.config.rollout import RolloutConfig, ValidationConfig
from posttrain.config.run import RunSection
from posttrain.config.sft import SftConfig
from posttrain.config.tracking import TrackingConfig


class RunConfig(Section):
    """One reinforcement-learning run."""

    model: ModelConfig
    """The model that is trained."""
    data: DataConfig
    """Prompts."""
    run: RunSection = RunSection()
    """Name, folder, seed, length."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of the responses."""
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    """Sampling ahead of training."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """The worlds that the policy acts in, turn by turn."""
    reward: RewardConfig = RewardConfig()
    """Scoring of the responses."""
    group_filter: GroupFilterConfig = GroupFilterConfig()
    """Groups without a signal."""
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    """Estimation of advantages from rewards."""
    resampling: ResamplingConfig = ResamplingConfig()
    """A second draw of the responses, by their scores."""
    loss: LossConfig = Field(default_factory=LossConfig)
    """Policy loss."""
    policy: PolicyConfig = PolicyConfig()
    """The update: batch sizes, optimizer, learning rate."""
    critic: CriticConfig = CriticConfig()
    """The model that estimates values, for estimators that need them."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of the KL."""
    distillation: OnPolicyDistillationConfig = Field(default_factory=OnPolicyDistillationConfig)
    """Teachers that grade every token of the responses."""
    validation: ValidationConfig = ValidationConfig()
    """Scoring held-out prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics, samples and trackers."""
    profiling: ProfilingConfig = ProfilingConfig()
    """Profiles of chosen phases of chosen steps."""
    placement: PlacementConfig = PlacementConfig()
    """Devices."""

    @model_validator(mode="before")
    @classmethod
    def _worlds_give_rewards(cls, values: Any) -> Any:
        """Drop the default reward terms where environments give the rewards, and pass whole rows to environments, unless terms or
        columns are configured."""
        environment = values.get("environment") if isinstance(values, Mapping) else None
        if not isinstance(environment, Mapping) or not (environment.get("named") or environment.get("name")):
            return values
        reward, data = values.get("reward") or {}, values.get("data")
        if environment.get("name") != SINGLE_TURN and isinstance(reward, Mapping) and "terms" not in reward:
            values = {**values, "reward": {**reward, "terms": []}}
        if isinstance(data, Mapping) and "extra_columns" not in data:
            values = {**values, "data": {**data, "extra_columns": ["*"]}}
        return values

    @model_validator(mode="before")
    @classmethod
    def _teachers_need_no_rewards(cls, values: Any) -> Any:
        """Drop the default reward terms where nothing but teachers is learned from, unless terms are configured."""
        section = values.get("distillation") if isinstance(values, Mapping) else None
        if not isinstance(section, Mapping) or not section.get("teachers") or section.get("with_rewards"):
            return values
        reward = values.get("reward") or {}
        if isinstance(reward, Mapping) and "terms" not in reward:
            values = {**values, "reward": {**reward, "terms": []}}
        return values

    @model_validator(mode="before")
    @classmethod
    def _rounded_weights_are_corrected_for(cls, values: Any) -> Any:
        """Correct for a sampler with rounded weights by truncated importance sampling, unless weights are configured or the ratio
        of the loss is to the sampler."""
        rollout = values.get("rollout") if isinstance(values, Mapping) else None
        if not isinstance(rollout, Mapping) or rollout.get("weights") != "int8":
            return values
        loss = values.get("loss") or {}
        correction = (loss.get("rollout_correction") or {}) if isinstance(loss, Mapping) else None
        if not isinstance(correction, Mapping) or "weights" in correction:
            return values
        try:
            read = LossConfig.model_validate(loss)
        except ValidationError:  # reported where the section is read
            return values
        if read.compares_with_sampler:
            return values
        return {**values, "loss": {**loss, "rollout_correction": {**correction, "weights": "token"}}}

    @property
    def context_tokens(self) -> int:
        """Tokens before a response, at most: a prompt, or, where environments are given more room, what a turn begins with."""
        if not self.environment.used:
            return self.data.max_prompt_tokens
        longest, whole = self.environment.max_context_tokens, self.environment.max_sequence_tokens
        if whole is not None:  # a whole turn behind it, and a shorter one behind more
            before = whole - self.rollout.max_response_tokens
            longest = before if longest is None else min(longest, before)
        return max(self.data.max_prompt_tokens, longest or 0)

    @property
    def folder(self) -> str:
        """The run folder."""
        return self.run.folder or f"runs/{self.run.name}"


TrainingConfig = (
    RunConfig | SftConfig
)  # with TuneConfig, an SftConfig; what trains a model, step by step, in a run folder
