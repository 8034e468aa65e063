"""Models that live in workers, with the interfaces of those that live here (interfaces.train_engine, interfaces.reward)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from posttrain.algos.balancing import balanced_parts
from posttrain.backends.runtime.ray.wire import from_plain, to_plain
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.config.process_reward import PROCESS_REFERENCE, PROCESS_REWARD
from posttrain.interfaces.roles import ProcessRewardModel
from posttrain.interfaces.train_engine import ScoringEngine
from posttrain.records.batches import LossCounts, SequenceBatch, TeacherScores, TrainBatch
from posttrain.records.computed_tensors import lies_elsewhere
from posttrain.records.plans import (
    CriticUpdatePlan,
    DistillationPlan,
    LossPlan,
    PreferencePlan,
    UpdatePlan,
    ValueLossPlan,
)
from posttrain.records.prompts import Prompt
from posttrain.records.statistics import ForwardBackwardStats, LossStats, OptimizerStats, UpdateStats, ValueStats
from posttrain.records.stored_tensors import StoredTensor, concatenated
from posttrain.records.trajectories import Outcome, TrajectoryGroup


class RemoteScorer:
    """See interfaces.train_engine.ScoringEngine. With ``copies`` every rank has all of the model, and scores a share of the rows
    on its own; without, they share it out among themselves."""

    def __init__(self, workers: WorkerGroup, role: str, *, copies: bool = False):
        self.workers = workers
        self.role = role
        self.copies = copies

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scores("logprobs", batch, temperature)

    def entropies(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scores("entropies", batch, temperature)

    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scores("sum_pi_squared", batch, temperature)

    def top_logprobs(self, batch: SequenceBatch, temperature: float, k: int) -> Tensor:
        return self._scores("top_logprobs", batch, temperature, k)

    def _scores(self, method: str, batch: SequenceBatch, *arguments: float) -> Tensor:
        what = f"{self.role} {method}"
        ranks = min(len(self.workers.members), len(batch))
        if self.copies and ranks > 1:
            loads = (batch.prompt_lengths + batch.response_lengths).tolist()
            parts = balanced_parts(loads, ranks)
            shares = [(to_plain(batch.rows(rows)), self.role, method, *arguments) for rows in parts]
            scored = [from_plain(each) for each in self.workers.scatter("score_share", shares, what=what)]
            together = (
                concatenated(scored) if all(isinstance(each, StoredTensor) for each in scored) else torch.cat(scored)
            )
            order = torch.tensor([row for rows in parts for row in rows])
            return together[order.argsort()]
        return _score(self.workers, self.role, method, batch, arguments, what)


class RowWorkers:
    """See interfaces.row_work.RowWork. Rows of stored tensors are shared out among the workers; others are computed here."""

    def __init__(self, workers: WorkerGroup):
        self._workers = workers

    def __call__(self, of: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        if not any(map(lies_elsewhere, tensors)):
            return of(*tensors)
        count = len(tensors[0])
        ranks = min(len(self._workers.members), count)
        bounds = pairwise(count * rank // ranks for rank in range(ranks + 1))
        shares = [self._workers.shelf.place([each[start:end] for each in tensors]) for start, end in bounds]
        asked = [(of, share.record, *share.arrays) for share in shares]
        found = self._workers.scatter("rows_of", asked, what="numbers of the batch's rows")
        return torch.cat([from_plain(each) for each in found])

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See interfaces.row_work.RowReader. The first worker fetches the arrays and passes on these rows alone."""
        stored = [each for each in tensors if lies_elsewhere(each)]
        if not stored:
            return list(tensors)
        held = self._workers.shelf.place(stored)
        [found] = self._workers.scatter("rows_in", [(held.record, *held.arrays)], what="rows of the batch")
        read = iter(found)
        return [next(read).read() if lies_elsewhere(each) else each for each in tensors]


def _score(
    workers: WorkerGroup, role: str, method: str, batch: SequenceBatch, arguments: Sequence[float], what: str
) -> Tensor:
    """Let all ranks score a batch together. Returns: [B, T]."""
    held = workers.shelf.place(batch)
    found: Tensor = workers.answer("score", held.record, role, method, arguments, *held.arrays, what=what)
    return found


class RemoteOptimized:
    """See interfaces.train_engine.OptimizedEngine."""

    def __init__(self, workers: WorkerGroup, role: str):
        self.workers = workers
        self.role = role

    note: str | None = None  # told once, by the runtime

    @property
    def version(self) -> int:
        # All ranks have made the same updates
        [found] = self.workers.scatter("version", [(self.role,)])
        assert isinstance(found, int)
        return found

    def begin_step(self) -> None:
        self._call("begin_step")

    def optimizer_step(self) -> OptimizerStats:
        stats = self._call("optimizer_step")
        assert isinstance(stats, OptimizerStats)
        return stats

    def zero_grad(self) -> None:
        self._call("zero_grad")

    def saved_bytes(self) -> int:
        found = self._call("saved_bytes")
        assert isinstance(found, int)
        return found

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.workers.call("save", self.role, folder.resolve(), optimizer, what=f"saving the {self.role}")

    def writer(self, *, optimizer: bool = True, sharded: bool = False) -> Callable[[Path], None]:
        what = f"saving the {self.role}"
        self.workers.call("gather", self.role, optimizer, sharded, what=what)
        return lambda folder: self.workers.each_aside("write", self.role, folder.resolve(), what=what)

    def load(self, folder: Path, *, optimizer: bool = True, schedule: bool = True) -> None:
        self.workers.call("load", self.role, folder.resolve(), optimizer, schedule, what=f"loading the {self.role}")

    def _call(self, method: str) -> object:
        return self.workers.call("model_call", self.role, method, what=f"{self.role} {method}")

    def make_updates(
        self, batch: TrainBatch, plan: UpdatePlan | CriticUpdatePlan, on_sequences: Callable[[int], None] | None
    ) -> UpdateStats:
        """See interfaces.train_engine.MakesUpdates. placement.call_timeout_s is for one mini-batch."""
        held, first = self.workers.shelf.place(batch), self.workers.members[0]
        left = len(batch) * plan.epochs
        first.take_sequences()

        def moved() -> bool:
            nonlocal left
            learned = min(first.take_sequences(), left)
            left -= learned
            if learned and on_sequences:
                on_sequences(learned)
            return learned > 0

        asked = held.record, self.role, plan, *held.arrays
        stats: UpdateStats = self.workers.answer("update", *asked, what=f"{self.role} update", moved=moved)
        if on_sequences:
            on_sequences(left)
        return stats

    def _learn(
        self, batch: TrainBatch, loss: LossPlan | PreferencePlan | ValueLossPlan, counts: LossCounts
    ) -> LossStats:
        held = self.workers.shelf.place(batch)
        what = f"{self.role} forward_backward"
        stats: LossStats = self.workers.answer("learn", held.record, self.role, loss, counts, *held.arrays, what=what)
        return stats


class RemotePolicy(RemoteOptimized, RemoteScorer):
    """See interfaces.train_engine.TrainEngine. Args: role, policy or process reward model."""

    def __init__(self, workers: WorkerGroup, role: str = "policy"):
        RemoteScorer.__init__(self, workers, role)

    def logprobs_and_experts(self, batch: SequenceBatch, temperature: float) -> tuple[Tensor, Tensor]:
        held = self.workers.shelf.place(batch)
        asked = held.record, self.role, "logprobs_and_experts", (temperature,), *held.arrays
        found: tuple[Tensor, Tensor] = self.workers.answer("score", *asked, what="policy logprobs")
        return found

    def logprobs_with(
        self, reference: ScoringEngine, batch: SequenceBatch, temperature: float
    ) -> tuple[Tensor, Tensor] | None:
        """See interfaces.train_engine.ScoresTogether."""
        if not isinstance(reference, RemoteScorer) or reference.workers is not self.workers or reference.copies:
            return None
        held, asked = self.workers.shelf.place(batch), [(self.role, "logprobs"), (reference.role, "logprobs")]
        found: tuple[Tensor, Tensor] = self.workers.answer(
            "score_all", held.record, asked, (temperature,), *held.arrays, what="policy and reference logprobs"
        )
        return found

    def reference_kl(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scores("reference_kl", batch, temperature)

    def divergence(self, batch: SequenceBatch, teachers: Mapping[str, TeacherScores], plan: DistillationPlan) -> Tensor:
        held = self.workers.shelf.place((batch, teachers))
        found: Tensor = self.workers.answer(
            "divergence", held.record, plan, *held.arrays, what="divergence from teachers"
        )
        return found

    def move_reference(self, mix: float) -> None:
        self.workers.call("move_reference", mix, what="mixing the policy into the reference")

    def forward_backward(
        self, batch: TrainBatch, loss: LossPlan | PreferencePlan, counts: LossCounts
    ) -> ForwardBackwardStats:
        stats = self._learn(batch, loss, counts)
        assert isinstance(stats, ForwardBackwardStats)
        return stats


def remote_process_reward(workers: WorkerGroup) -> ProcessRewardModel:
    """The process reward model and its reference, beside the policy."""
    return ProcessRewardModel(
        engine=RemotePolicy(workers, PROCESS_REWARD), reference=RemoteScorer(workers, PROCESS_REFERENCE)
    )


class RemoteCritic(RemoteOptimized):
    """See interfaces.train_engine.ValueEngine."""

    def values(self, batch: SequenceBatch) -> Tensor:
        return _score(self.workers, self.role, "values", batch, (), "critic values")

    def forward_backward(self, batch: TrainBatch, loss: ValueLossPlan, counts: LossCounts) -> LossStats:
        return self._learn(batch, loss, counts)


class RemoteRewardLearner(RemoteOptimized):
    """See interfaces.train_engine.ScoreEngine: a reward model in training."""

    def values(self, batch: SequenceBatch) -> Tensor:
        return _score(self.workers, self.role, "values", batch, (), "scores")

    def forward_backward(self, batch: TrainBatch, loss: PreferencePlan, counts: LossCounts) -> ValueStats:
        stats = self._learn(batch, loss, counts)
        assert isinstance(stats, ValueStats)
        return stats


class RemoteRewardModel:
    """See interfaces.reward.RewardModel: every rank has all of the model and scores a share of the groups.

    Args: role, reward model or judge; reads_references: the reference answers are sent, too.
    """

    def __init__(self, workers: WorkerGroup, role: str = "reward model", *, reads_references: bool = False):
        self.workers = workers
        self.role = role
        self.reads_references = reads_references

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        ranks = len(self.workers.members)
        # What a grader needs and the model does not stays here.
        plain = [replace(each, prompt=self._plain(each.prompt)) for each in groups]
        shares = [(self.role, plain[rank::ranks]) for rank in range(ranks)]
        found = self.workers.scatter("reward", shares, what=f"{self.role} score")
        return [found[number % ranks][number // ranks] for number in range(len(groups))]

    def _plain(self, prompt: Prompt) -> Prompt:
        return replace(prompt, ground_truth=prompt.ground_truth if self.reads_references else None, extra_info={})
