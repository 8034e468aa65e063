"""What the critic expects, before it learns what came."""

from __future__ import annotations

from dataclasses import replace

from posttrain.interfaces.train_engine import ValueEngine
from posttrain.records.batches import SequenceBatch


def add_values(batch: SequenceBatch, critic: ValueEngine) -> SequenceBatch:
    """V(s_t) at every response token, by the weights that the step starts with."""
    return replace(batch, values=critic.values(batch))
