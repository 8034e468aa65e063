"""The models of a run and where they live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from posttrain.config import RunConfig, SftConfig
from posttrain.interfaces.reward import RewardModel
from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.interfaces.train_engine import ScoringEngine, TrainEngine, ValueEngine
from posttrain.interfaces.weight_sync import WeightSync
from posttrain.interfaces.worlds import Worlds
from posttrain.records.notices import Notices
from posttrain.records.plans import BatchPlan, ProfilePlan, SftBatchPlan
from posttrain.records.work import Work


class WorkersProfiler(Protocol):
    """Has other processes record what they do in a phase."""

    @property
    def on_cuda(self) -> bool:
        """Whether they work on CUDA devices."""
        ...

    def begin(self, phase: str, plan: ProfilePlan) -> None:
        """In the workers with the phase's roles, of the ranks in the plan. An earlier recording is dropped."""
        ...

    def end(self, folder: Path, stem: str) -> list[str]:
        """Each of them writes ``folder/stem_WORKER.json.gz`` and what else the plan asks for. Returns what there is to tell."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What a loop speaks to. It cannot tell whether these live in this process or on another machine."""

    policy: TrainEngine
    rollout: RolloutEngine
    weight_sync: WeightSync
    reference: ScoringEngine | None  # None: no log-probs of a reference are asked for
    critic: ValueEngine | None = None  # None: the advantage estimator needs no values
    reward_model: RewardModel | None = None  # None: rewards are made of terms alone
    worlds: Worlds | None = None  # None: a response is one turn, and no environment answers it
    device: str  # for people: what the policy runs on
    notices: Notices = field(default_factory=Notices)  # for people: what engines have to tell while they work
    work: Work | None = None  # how much an update is for this device; None: not known
    notes: tuple[str, ...] = ()  # for people: how models are computed where it is not the usual way
    profiler: WorkersProfiler | None = None  # None: all models live in this process
    close: Callable[[], None] = lambda: None  # ends what the runtime has started besides this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """What the loop of supervised fine-tuning speaks to: the policy alone. The rest is as in Roles."""

    policy: TrainEngine
    device: str
    notices: Notices
    notes: tuple[str, ...] = ()
    profiler: WorkersProfiler | None = None
    close: Callable[[], None] = lambda: None


class Runtime(Protocol):
    """Brings the roles to life on devices."""

    def start(self, config: RunConfig, batches: BatchPlan, tokenizer: PreTrainedTokenizerBase) -> Roles: ...

    def start_sft(self, config: SftConfig, batches: SftBatchPlan, tokenizer: PreTrainedTokenizerBase) -> Learner: ...
