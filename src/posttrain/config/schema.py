"""RunConfig: everything a run is told, in one frozen value. Nothing past the dialects reads another configuration."""

from __future__ import annotations

from posttrain.config.algorithm import AdvantageConfig, LossConfig
from posttrain.config.base import Section
from posttrain.config.checkpoint import CheckpointConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.data import DataConfig
from posttrain.config.group_filter import GroupFilterConfig
from posttrain.config.model import ModelConfig, ReferenceConfig
from posttrain.config.placement import PlacementConfig
from posttrain.config.policy import PolicyConfig
from posttrain.config.reward import RewardConfig
from posttrain.config.rollout import RolloutConfig, ValidationConfig
from posttrain.config.run import RunSection
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
    """How responses are sampled."""
    reward: RewardConfig = RewardConfig()
    """How responses are scored."""
    group_filter: GroupFilterConfig = GroupFilterConfig()
    """Groups without a signal."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    loss: LossConfig = LossConfig()
    """From advantages to the loss."""
    policy: PolicyConfig = PolicyConfig()
    """The update: batch sizes, optimizer, learning rate."""
    critic: CriticConfig = CriticConfig()
    """The model that estimates values, for estimators that need them."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of the KL."""
    validation: ValidationConfig = ValidationConfig()
    """Scoring held-out prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved, and when."""
    tracking: TrackingConfig = TrackingConfig()
    """Where metrics and samples go."""
    placement: PlacementConfig = PlacementConfig()
    """Devices."""

    @property
    def folder(self) -> str:
        """The run folder."""
        return self.run.folder or f"runs/{self.run.name}"
