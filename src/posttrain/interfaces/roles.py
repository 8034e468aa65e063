"""The models of a run and where they live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from posttrain.config import RunConfig
from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.interfaces.train_engine import ScoringEngine, TrainEngine
from posttrain.interfaces.weight_sync import WeightSync
from posttrain.records.plans import BatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What a loop speaks to. It cannot tell whether these live in this process or on another machine."""

    policy: TrainEngine
    rollout: RolloutEngine
    weight_sync: WeightSync
    reference: ScoringEngine | None  # None: no KL is asked for
    device: str  # for people: what the policy runs on


class Runtime(Protocol):
    """Brings the roles to life on devices."""

    def start(self, config: RunConfig, batches: BatchPlan, tokenizer: PreTrainedTokenizerBase) -> Roles: ...
