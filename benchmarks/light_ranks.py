"""Ranks without a model, so that a machine can hold many: processes of Ray that load no torch and answer as ranks of a policy do
that also samples, or as samplers on devices of their own. The first rank of a run is a real one (null_engines.py) and has the
whole batch; the others sample like it, read no batch, take weights without a look and report nothing. Several can be in one
process, where memory asks for it; one that is started again has a process of its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from null_samples import NullSamples, NullStream
from numpy.typing import NDArray

from posttrain.backends.runtime.ray.packed import Packed
from posttrain.backends.runtime.ray.worker import AskedPrompts, Outbox, PackedGroups, Worker, prompts_of
from posttrain.interfaces.crew import Order, Turned
from posttrain.interfaces.rollout_engine import OnTokens, Served
from posttrain.records.trajectories import SamplingParams
from posttrain.steps.seat import StreamSeat

# Columns of the tables that ranks make of their rows (steps.measure, steps.shape_rewards, algos, run.samples)
COLUMNS = {
    "gaps_of_rows": 4,
    "weights_of_rows": 3,
    "moments_of_rows": 5,
    "returns_and_errors": 10,
    "_means": 2,
    "sums_of_rows": 1,
    "sums_and_ends": 4,
    "sums_of_weights": 4,
    "first_values": 1,
    "_write_rows": 1,
}

SINGLE = ("_means", "sums_of_rows")  # of these, in the precision of the tensors


class LightRoles:
    """The methods of worker_roles.WorkerRoles, its sender and its taker that a step calls. Args: trains, beside the policy."""

    def __init__(self, outbox: Outbox, trains: bool):
        from posttrain.backends.runtime.ray.cluster import store

        self.outbox, self._updates = outbox, 0
        self.sender = self.taker = self
        self.seat = StreamSeat(self, resumes=True)
        if trains:
            outbox.keep = store

    def notes(self) -> list[str]:
        return []

    def failed(self) -> None:
        """No server is beside it."""

    def share_weights(self, version: int) -> None:
        self._updates = version

    def generate(self, call: int, asked: AskedPrompts, sampling: SamplingParams) -> PackedGroups:
        samples, draw = NullSamples(sampling, self._updates), random.Random(sampling.seed)
        for number, prompt in prompts_of(asked):
            responses = samples.of(prompt, draw)
            self.outbox.add_tokens(sum(len(each.token_ids) for each in responses))
            self.outbox.add_group((call, number), responses)
        return self.outbox.take_groups()

    def nothing(self, *asked: Any) -> None:
        """Report nothing: a real rank would give the places of the rows that it computed."""

    score = score_all = update = model_call = settings = begin = next_bucket = take_bucket = finish = nothing

    def turn(self, order: Order) -> Packed[Turned]:
        return self.outbox.packed(self.seat.turn(order))

    def serve(self, sent: Served) -> Served:
        """Answer as a sampler that has taken what was sent."""
        self._updates = sent.version
        return sent

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> NullStream:
        return NullStream(self._updates, on_tokens)

    def rows_of(self, rows: int, of: Sequence[str]) -> NDArray[Any]:
        """Make an empty table. Args: names of the functions whose answers are beside each other in it."""
        if len(of) > 1:  # each behind a column, see records.computed_tensors
            return np.zeros((rows, sum(1 + COLUMNS[name] for name in of)))
        return np.zeros((rows, COLUMNS[of[0]]), np.float32 if of[0] in SINGLE else np.float64)


def start_light_roles(outbox: Outbox, trains: bool) -> LightRoles:
    return LightRoles(outbox, trains)


def names_of(of: Any) -> list[str]:
    """The functions that an answer about rows is made by."""
    if getattr(of, "func", of).__name__ == "_tables":
        return [name for function, _ in of.args[0] for name in names_of(function)]
    return [getattr(of, "func", of).__name__]


class LightProcess:
    """A process with several ranks, each a Worker of its own."""

    def __init__(self, node: str, host: str):
        self._place, self._workers = (node, host), dict[str, Worker]()
        self._starting = threading.Lock()

    def on(self, rank: str, method: str, *arguments: Any) -> Any:
        """Call a method of a rank's Worker, which begins with its first call."""
        with self._starting:
            if rank not in self._workers:
                self._workers[rank] = Worker(rank, *self._place)
        return getattr(self._workers[rank], method)(*arguments)


class LightHandle:
    """Stands where Ray's handle of a Worker would."""

    def __init__(self, process: Any, rank: str):
        self.process, self.rank = process, rank

    def __getattr__(self, method: str) -> LightMethod:
        return LightMethod(self, method, {})


class LightMethod:
    """Stands where a method of Ray's handle would."""

    def __init__(self, handle: LightHandle, method: str, options: dict[str, Any]):
        self._handle, self._method, self._options = handle, method, options

    def options(self, **options: Any) -> LightMethod:
        return LightMethod(self._handle, self._method, options)

    def remote(self, *arguments: Any) -> Any:
        call = self._handle.process.on.options(**self._options)
        return call.remote(self._handle.rank, self._method, *arguments)


def use_light_ranks(per_process: int) -> None:
    """Let the runtime start light ranks, so many in a process, in the place of all but the first."""
    import ray

    from posttrain.backends.runtime.ray import cluster as module
    from posttrain.backends.runtime.ray import sync, worker_group
    from posttrain.backends.runtime.ray.cluster import Cluster
    from posttrain.backends.runtime.ray.shelf import Shelf

    spawn, call, kill, place = Cluster.spawn, Cluster.call, Cluster.kill, Shelf.place
    names: set[str] = set()  # of ranks that were started
    processes: list[Any] = []
    rows: dict[bytes, int] = {}  # of the tensors behind a record, by the name of its promise
    module.CALLS_AT_A_TIME *= per_process

    def light_spawn(cluster: Any, kind: type, arguments: Sequence[Any], **how: Any) -> Any:
        name, *node = arguments
        if not names:
            names.add(name)
            return spawn(cluster, kind, arguments, **how)
        if name in names:
            return LightHandle(spawn(cluster, LightProcess, node, **how), name)
        if (len(names) - 1) % per_process == 0:
            processes.append(spawn(cluster, LightProcess, node, **how))
        names.add(name)
        return LightHandle(processes[-1], name)

    def light_call(cluster: Any, handle: Any, method: str, *arguments: Any) -> Any:
        if method == "begin":
            start, assignment = arguments
            if isinstance(handle, LightHandle):
                trains = "policy" in assignment.roles
                return call(cluster, handle, method, "light_ranks:start_light_roles", trains)
            return call(cluster, handle, method, start, replace(assignment, ranks=1, meeting=None))
        if isinstance(handle, LightHandle) and method == "call":
            name, wanted, *given = arguments
            if name == "rows_of":
                of, record, *_ = given
                given = [rows[record.binary()], names_of(of)]
            # It reads no batch, whose records are of torch
            given = [None if isinstance(each, ray.ObjectRef) else each for each in given]
            arguments = (name, wanted, *given)
        return call(cluster, handle, method, *arguments)

    def light_kill(cluster: Any, handle: Any) -> None:
        kill(cluster, handle.process if isinstance(handle, LightHandle) else handle)

    def counted_place(shelf: Any, value: Any) -> Any:
        found = place(shelf, value)
        if isinstance(value, list) and value:
            rows[found.record.binary()] = len(value[0])
        return found

    all_serve = sync._all_serve

    def light_serve(trainers: Any, samplers: Any, announced: Served, *how: Any) -> Served:
        return all_serve(trainers, samplers, announced, "taker.serve", announced)

    sync._all_serve = light_serve
    whole_of = worker_group.whole_of

    def of_some(answers: Sequence[Any]) -> Any:
        return whole_of([each for each in answers if each is not None])

    worker_group.whole_of = of_some
    Cluster.spawn, Cluster.call, Cluster.kill = light_spawn, light_call, light_kill  # type: ignore[method-assign]
    Shelf.place = counted_place  # type: ignore[method-assign]
