"""The roles in a worker: one rank of those that share its devices, or one copy of the sampler on devices of its own.

The driver calls the methods of ``WorkerRoles``, and those of its ``sender`` and ``taker`` of weights, by name. Every rank of a
group gets the same calls in the same order, so that collective operations (gathering weights, adding up gradients) match.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from posttrain.backends.runtime.ray.answers import Answer, answer_of, with_tensors
from posttrain.backends.runtime.ray.assignment import WorkerAssignment
from posttrain.backends.runtime.ray.cluster import store
from posttrain.backends.runtime.ray.columns import Columns, to_columns
from posttrain.backends.runtime.ray.led_stream import LedStream
from posttrain.backends.runtime.ray.packed import Packed
from posttrain.backends.runtime.ray.sending import Sender
from posttrain.backends.runtime.ray.shelf import taken_down
from posttrain.backends.runtime.ray.started_roles import Starter
from posttrain.backends.runtime.ray.taking import Taker
from posttrain.backends.runtime.ray.wire import from_plain, to_plain
from posttrain.backends.runtime.ray.worker import AskedPrompts, Outbox, PackedGroups, prompts_of
from posttrain.config import RunConfig, TrainingConfig
from posttrain.errors import RunStopped
from posttrain.interfaces.crew import Order, Turned
from posttrain.interfaces.rollout_engine import Request, RolloutEngine, Served
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.models.weight_transfer import Manifest, entry_of, manifest_of
from posttrain.records.batches import LossCounts, SequenceBatch, TrainBatch
from posttrain.records.notices import FROM_OWN_FUNCTIONS, Notices
from posttrain.records.partial_tensors import results_in_parts
from posttrain.records.plans import (
    CriticUpdatePlan,
    DistillationPlan,
    LossPlan,
    PreferencePlan,
    UpdatePlan,
    ValueLossPlan,
)
from posttrain.records.statistics import UpdateStats
from posttrain.records.stored_tensors import StoredTensor, stored_rows, unread_rows
from posttrain.records.trajectories import SamplingParams, Trajectory, TrajectoryGroup
from posttrain.records.unread_tensors import UnreadTensor
from posttrain.registry import ROLLOUT_ENGINES
from posttrain.run.profile import Recording
from posttrain.steps.mini_batches import is_drawn
from posttrain.steps.seat import StreamSeat
from posttrain.steps.update import critic_updates, policy_updates


def start_worker_roles(outbox: Outbox, assignment: WorkerAssignment) -> WorkerRoles:
    """Load the models of this rank. Raises: RequestError for what is wrong with them; RunStopped."""
    return WorkerRoles(outbox, assignment)


class WorkerRoles:
    """The engines of a worker's roles, and the methods that the driver calls."""

    def __init__(self, outbox: Outbox, assignment: WorkerAssignment):
        config: TrainingConfig = assignment.kind.model_validate_json(assignment.config)
        self.config, self.outbox, self._rank = config, outbox, assignment.rank
        if assignment.visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = assignment.visible
        torch.set_num_threads(assignment.threads)
        disable_progress_bar()  # every line that is printed here goes to the driver
        _enter_folders(assignment)
        import_modules(config.model.external_modules)
        self.notices = Notices()
        self.recording = Recording()  # of a profile; the driver calls it by name, too
        self.tokenizer = load_tokenizer(config.model)
        self._led: LedStream | None = None
        self._writers: dict[str, Callable[[Path], None]] = {}
        self._started = Starter(config, assignment, self.tokenizer, self.notices).start()
        self.roles = self._started.engines
        # A sampler on its own devices can be lost, and what it puts into the store with it: its arrays are the driver's
        if "policy" in assignment.roles:
            outbox.keep = store
        # The sampler as a member of a crew, which keeps what it has begun
        self.seat = self._seat() if "rollout" in self.roles else None

    @property
    def sender(self) -> Sender:
        """Sends the policy's weights; in a worker with the policy."""
        assert self._started.sender is not None
        return self._started.sender

    @property
    def taker(self) -> Taker:
        """Takes weights for a sampler that has its own."""
        assert self._started.taker is not None
        return self._started.taker

    def served_at(self) -> str:
        """Return the address of the server for reward functions that this worker has started, HOST:PORT."""
        return self._started.served_at

    def notes(self) -> list[str]:
        """Return sentences for people: how roles are computed, where it is not the usual way."""
        return [role.note for role in self.roles.values() if getattr(role, "note", None)] + self._started.notes

    def failed(self) -> None:
        """Look after a server when a call has raised an error, before that is reported."""
        if self._started.server is not None:
            self._started.server.doubt()

    def model_call(self, role: str, method: str) -> Any:
        """Call a method of a model's engine that takes no argument."""
        self._started.take_turn(role)
        return getattr(self.roles[role], method)()

    def score_share(self, batch: Any, role: str, method: str, *arguments: float) -> Any:
        """Call a method that gives [B, T] for this rank's own SequenceBatch, a plain value; the result is stored."""
        self._started.take_turn(role)
        rows = from_plain(batch)
        found = getattr(self.roles[role], method)(rows, *arguments)
        return self._reported(stored_rows(found, rows.response_lengths, store) if found.ndim == 2 else found)

    def score(self, batch: Any, role: str, method: str, arguments: Sequence[float], *arrays: Any) -> Any:
        """Call a method that gives [B, T] for the SequenceBatch of all ranks (see shelf); each rank stores its rows of it."""
        rows = taken_down(batch, arrays)
        return self._answer(self._scored(rows, role, method, arguments), rows)

    def score_all(self, batch: Any, asked: Sequence[tuple[str, str]], arguments: Sequence[float], *arrays: Any) -> Any:
        """The same for several roles, one after the other. Args: asked, roles and methods. Returns: a tuple."""
        rows = taken_down(batch, arrays)
        return self._answer(tuple(self._scored(rows, role, method, arguments) for role, method in asked), rows)

    def _scored(self, rows: SequenceBatch, role: str, method: str, arguments: Sequence[float]) -> Any:
        self._started.take_turn(role)
        with results_in_parts():
            return getattr(self.roles[role], method)(rows, *arguments)

    def rows_of(self, of: Callable[..., Tensor], tensors: Any, *arrays: Any) -> Any:
        """Compute a function of this rank's rows of tensors (see shelf), [b, ...]; the result as a plain value."""
        return to_plain(of(*taken_down(tensors, arrays)))

    def rows_in(self, tensors: Any, *arrays: Any) -> list[StoredTensor]:
        """Read rows of stored tensors (see shelf). Returns: these rows alone, as values of the message."""
        return [each.gathered() for each in taken_down(tensors, arrays)]

    def divergence(self, asked: Any, plan: DistillationPlan, *arrays: Any) -> Any:
        """Measure the divergence of the policy from its teachers, for a SequenceBatch and the teachers' answers (see shelf)."""
        self._started.take_turn("policy")
        batch, answers = taken_down(asked, arrays)
        with results_in_parts():
            found = self.roles["policy"].divergence(batch, answers, plan)
        return self._answer(found, batch)

    def learn(
        self,
        batch: Any,
        role: str,
        loss: LossPlan | PreferencePlan | ValueLossPlan,
        counts: LossCounts,
        *arrays: Any,
    ) -> Any:
        """Run forward and backward over a TrainBatch (see shelf); of tokens each rank stores its rows."""
        self._started.take_turn(role)
        rows = taken_down(batch, arrays)
        with results_in_parts():
            stats = self.roles[role].forward_backward(rows, loss, counts)
        return self._answer(stats, rows.sequences)

    def update(self, batch: Any, role: str, plan: UpdatePlan | CriticUpdatePlan, *arrays: Any) -> Any:
        """Go through the updates of a step on a TrainBatch (see shelf), every rank alike; the first one reports."""
        self._started.take_turn(role)
        rows: TrainBatch = taken_down(batch, arrays)
        drawn = is_drawn(rows, plan)
        if drawn:  # so that a rank copies rows of its own micro-batches alone
            rows = with_tensors(rows, _unread)
        updates: Callable[..., UpdateStats] = critic_updates if isinstance(plan, CriticUpdatePlan) else policy_updates
        with results_in_parts():
            stats = updates(self.roles[role], rows, plan, self.outbox.add_sequences)
        first = stats.trainer_logprobs
        if first is None or drawn or rows.logprobs.old is not None:
            return self._answer(replace(stats, trainer_logprobs=None), rows.sequences)
        return self._answer(stats, rows.sequences.rows(list(range(len(first)))))

    def move_reference(self, mix: float) -> None:
        self._started.take_turn("policy", "reference")
        self.roles["policy"].move_reference(mix)

    def save(self, role: str, folder: Path, optimizer: bool) -> None:
        self._started.take_turn(role)
        self.roles[role].save(folder, optimizer=optimizer)

    def gather(self, role: str, optimizer: bool, sharded: bool) -> None:
        """Do the first part of saving; ``write`` is the second, beside other work."""
        self._started.take_turn(role)
        self._writers[role] = self.roles[role].writer(optimizer=optimizer, sharded=sharded)

    def write(self, role: str, folder: Path) -> None:
        self._writers.pop(role)(folder)

    def load(self, role: str, folder: Path, optimizer: bool, schedule: bool) -> None:
        self._started.take_turn(role)
        self.roles[role].load(folder, optimizer=optimizer, schedule=schedule)

    def version(self, role: str) -> int:
        found: int = self.roles[role].version
        return found

    def reward(self, role: str, groups: Sequence[TrajectoryGroup]) -> Any:
        """Score groups by a reward model or a judge."""
        self._started.take_turn(role)
        return self.roles[role].score(groups)

    def generate(self, call: int, asked: AskedPrompts, sampling: SamplingParams) -> PackedGroups:
        """Sample. Finished groups go to the outbox; those not fetched from there are returned.

        Args: ``call`` is the driver's number of this call, and each prompt has its number in it.
        """
        self._started.take_turn("rollout")
        prompts = prompts_of(asked)
        numbers = {id(prompt): number for number, prompt in prompts}

        def done(group: TrajectoryGroup) -> None:
            self.outbox.add_group((call, numbers[id(group.prompt)]), group.trajectories)

        self.rollout.generate([prompt for _, prompt in prompts], sampling, self.outbox.add_tokens, done)
        return self.outbox.take_groups()

    def turn(self, order: Order) -> Turned | Packed[Turned]:
        """Take a turn of the seat. The tokens of its responses are beside the answer."""
        assert self.seat is not None, "a worker with a sampler has a seat"
        turned = self.seat.turn(order)
        return turned if self._plays else self.outbox.packed(turned)

    def open_stream(self, sampling: SamplingParams) -> None:
        self._started.take_turn("rollout")
        self._stream = self.rollout.open_stream(sampling, self.outbox.add_tokens)

    def sample(self, requests: Sequence[Request], cancelled: Sequence[str], timeout_s: float) -> Columns[Trajectory]:
        """Add and cancel requests, sample for a while, and return what has ended."""
        if cancelled:
            self._stream.cancel(cancelled)
        if requests:
            self._stream.submit(requests)
        return to_columns(self._stream.wait(timeout_s), Trajectory)

    def close_stream(self) -> None:
        self._stream.close()

    def share_weights(self, version: int) -> tuple[Served, Served] | None:
        """Give the sampler of this very process the policy's weights; return what was sent and what has arrived, by their hashes.

        None where the sampler reads the policy's own tensors.
        """
        if self._started.copy is None:
            self.rollout.weights_changed(version)
            return None
        self._started.take_turn("policy", "rollout")
        sent = []
        for name, tensor in self.sender.weights():
            sent.append(entry_of(name, tensor))
            self._started.arriving[name].data.copy_(tensor)
        arrived = manifest_of(self._started.arriving.items(), version)
        manifest = Manifest(version, tuple(sent))
        self.rollout.weights_changed(version)
        return Served(version, manifest.content_hash, manifest.nbytes), Served(version, arrived.content_hash)

    @property
    def _plays(self) -> bool:
        """True where the driver plays episodes with what is sampled: it writes the next turn from the tokens."""
        return isinstance(self.config, RunConfig) and self.config.environment.used

    def _seat(self) -> StreamSeat:
        assert isinstance(self.config, RunConfig), "only reinforcement learning samples"
        resumes = ROLLOUT_ENGINES.facts(self.config.rollout.engine).resumes_responses
        keeps = self.config.asynchronous.cache_on_new_weights == "keep"
        return StreamSeat(self.rollout, resumes=resumes, keeps_cache=keeps)

    @property
    def led(self) -> LedStream:
        """The sampler's stream where all workers advance by the same passes."""
        if self._led is None:
            take_turn = partial(self._started.take_turn, "rollout")
            self._led = LedStream(self.rollout, self.outbox, take_turn, stores=not self._plays)
        return self._led

    @property
    def rollout(self) -> RolloutEngine:
        engine: RolloutEngine = self.roles["rollout"]
        return engine

    def _answer(self, result: Any, batch: SequenceBatch) -> Answer:
        """Return this rank's part of a result, and of the first rank everything else of it."""
        self._send_notices()
        return answer_of(result, batch.response_lengths, store, first=self._rank == 0)

    def _reported(self, result: Any) -> Any:
        """Return a result as a plain value, and put the notices for people into the outbox."""
        self._send_notices()
        return to_plain(result)

    def _send_notices(self) -> None:
        """Put the notices of the first rank, and those of every rank about functions of the user's own, into the outbox."""
        self.outbox.add_notices(FROM_OWN_FUNCTIONS.take())
        if self._rank == 0:
            self.outbox.add_notices(self.notices.take())


def _unread(tensor: Tensor) -> Tensor:
    """Leave the rows of a tensor [B, T] unread until they are computed."""
    return unread_rows(tensor) if tensor.ndim == 2 and not isinstance(tensor, UnreadTensor) else tensor


def _enter_folders(assignment: WorkerAssignment) -> None:
    """Change to the folder in which relative paths begin.

    Raises: RunStopped when this node lacks a folder: checkpoints are read and written by workers.
    """
    missing = [folder for folder in assignment.folders if not Path(folder).is_dir()]
    if missing:
        raise RunStopped(
            f"{assignment.node} does not see {' and '.join(missing)}; start the run in a folder, and with a run.folder, on "
            "a file system that all nodes of the run share"
        )
    os.chdir(assignment.folders[1])
