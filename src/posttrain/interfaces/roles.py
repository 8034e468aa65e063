"""Roles: the models of a run, and the runtime that places them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from posttrain.config import RunConfig, SftConfig, TuneConfig
from posttrain.interfaces.beside import BesideTraining
from posttrain.interfaces.crew import Crew
from posttrain.interfaces.reward import RewardModel
from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.interfaces.row_work import RowReader, RowWork, as_they_are, in_this_process
from posttrain.interfaces.train_engine import ScoreEngine, ScoringEngine, TeacherEngine, TrainEngine, ValueEngine
from posttrain.interfaces.weight_sync import WeightSync
from posttrain.interfaces.worlds import Worlds
from posttrain.records.batch_plans import BatchPlan, SftBatchPlan
from posttrain.records.notices import Notices
from posttrain.records.plans import ProfilePlan
from posttrain.records.trajectories import SamplingParams
from posttrain.records.work import Work


class WorkersProfiler(Protocol):
    """Profiles the worker processes during a phase."""

    @property
    def on_cuda(self) -> bool:
        """True when the workers use CUDA devices."""
        ...

    def begin(self, phase: str, plan: ProfilePlan) -> None:
        """Start recording in the workers with the phase's roles, on the ranks of the plan. An earlier recording is dropped."""
        ...

    def end(self, folder: Path, stem: str) -> list[str]:
        """Write ``folder/stem_WORKER.json.gz``, and the plan's other outputs, from each worker. Returns: messages."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRewardModel:
    """A model that is trained to reward tokens, and the frozen one that it is compared with."""

    engine: TrainEngine
    reference: ScoringEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The models and services that a loop uses, in this process or on other machines."""

    policy: TrainEngine
    rollout: RolloutEngine
    weight_sync: WeightSync
    reference: ScoringEngine | None  # None: no reference log-probs are needed
    # By name; without those that are computed inside the policy's forward pass
    teachers: Mapping[str, TeacherEngine] = field(default_factory=dict)
    critic: ValueEngine | None = None  # None: the advantage estimator needs no values
    process_reward: ProcessRewardModel | None = None  # None: tokens have no rewards of their own
    reward_model: RewardModel | None = None  # None: reward terms give all rewards
    judges: Mapping[str, RewardModel] = field(
        default_factory=dict
    )  # language models of the run that grade responses, by name
    reward_servers: tuple[str, ...] = ()  # HOST:PORT of each copy of a model that reward functions ask
    crew: Crew | None = None  # samplers that work while the trainer does; None: they take turns with it
    beside: BesideTraining | None = None  # samplers in workers that sample in another thread while a step trains
    over_rows: RowWork = in_this_process  # where the tokens of a batch are
    read_rows: RowReader = as_they_are
    worlds: Worlds | None = None  # None: single-turn responses without an environment
    validation_worlds: Worlds | None = None  # None: validation plays in worlds
    device: str  # the policy's device, for display
    notices: Notices = field(default_factory=Notices)  # messages of engines while they work, for display
    work: Work | None = None  # cost of an update on this device; None: unknown
    notes: tuple[str, ...] = ()  # unusual ways in which models are computed, for display
    profiler: WorkersProfiler | None = None  # None: all models live in this process
    close: Callable[[], None] = lambda: None  # ends the processes that the runtime started

    def most_tokens(self, prompts: int, sampling: SamplingParams) -> int | None:
        """Response tokens of so many prompts if every response were as long as allowed; None where turns are not limited."""
        turns = self.worlds.rules.max_turns if self.worlds else 1
        return None if turns is None else prompts * sampling.samples_per_prompt * sampling.max_response_tokens * turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The policy and its services, for the loop of supervised fine-tuning. Fields as in Roles."""

    policy: TrainEngine
    device: str
    notices: Notices
    teachers: Mapping[str, TeacherEngine] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    profiler: WorkersProfiler | None = None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The model that is tuned and the one that it is compared with, for the loop of tuning. Fields as in Roles."""

    engine: TrainEngine | ScoreEngine  # the latter where the method trains a score head
    reference: ScoringEngine | None  # None: the method has none, or the rows carry its log-probs
    device: str
    notices: Notices
    notes: tuple[str, ...] = ()
    profiler: WorkersProfiler | None = None
    close: Callable[[], None] = lambda: None


class Runtime(Protocol):
    """Starts the roles on their devices."""

    def start(self, config: RunConfig, batches: BatchPlan, tokenizer: PreTrainedTokenizerBase) -> Roles: ...

    def start_sft(self, config: SftConfig, batches: SftBatchPlan, tokenizer: PreTrainedTokenizerBase) -> Learner: ...

    def start_tune(self, config: TuneConfig, batches: SftBatchPlan, tokenizer: PreTrainedTokenizerBase) -> Tuned: ...
