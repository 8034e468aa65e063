"""Weight sync to a sampler that reads the trainer's own tensors: only the version is passed."""

from __future__ import annotations

from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.registry import WEIGHT_SYNCS


@WEIGHT_SYNCS.register("in_memory")
class InMemorySync:
    """See interfaces.weight_sync.WeightSync."""

    sent_bytes = 0

    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        rollout.weights_changed(policy.version)
