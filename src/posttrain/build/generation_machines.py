"""Copies of the sampler of a generation on several machines, in workers of Ray.

Parts are dealt over the copies as on one machine, and a copy writes its own: the output's folder must be one that all machines
see. A copy may lie on several of them, as a server's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.backends.runtime.inprocess import start_sampler
from posttrain.backends.runtime.ray.cluster import Cluster, worker_environment
from posttrain.backends.runtime.ray.launching import launch, supervised
from posttrain.backends.runtime.ray.role_groups import RoleGroup
from posttrain.backends.runtime.ray.spans import places_of
from posttrain.backends.runtime.ray.watch import Member, Watch
from posttrain.backends.runtime.ray.worker import Outbox
from posttrain.backends.serving.launch import Follower
from posttrain.build.generation_copies import devices_of_a_copy, done
from posttrain.build.plans import sampling_params
from posttrain.config.generate import GenerateConfig
from posttrain.data.generation import load_generation
from posttrain.errors import RunInterrupted, RunStopped
from posttrain.interfaces.rollout_engine import NodeSpan
from posttrain.libraries.cores import available_cores
from posttrain.loops import generate
from posttrain.loops.by_parts import OnWork
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.models.processors import load_processor
from posttrain.plan.placement import Rank
from posttrain.records.notices import Notices
from posttrain.run.parts import Parts
from posttrain.run.stopping import StopSignal

START = "posttrain.build.generation_machines:start_copy"
STORE_BYTES = 256 << 20  # of a cluster of the generation's own: only texts and numbers cross


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyAssignment:
    """The work of one worker, in plain values."""

    config: str  # as JSON
    request: Any  # see Parts
    folder: str  # in which relative paths begin
    node: str  # its address, for messages
    threads: int
    cuda: bool
    visible: str = ""  # devices of a copy that several share, as CUDA_VISIBLE_DEVICES; "": this worker's own
    span: NodeSpan | None = None  # of a copy on several machines


def sample_on_machines(
    config: GenerateConfig, parts: Parts, request: Any, *, stop: StopSignal, on_work: OnWork
) -> None:
    """Sample every part that is not done yet, dealt over the copies.

    Raises: ConfigError for a cluster without these devices; RunInterrupted when a signal asked to stop; RunStopped when a copy
        failed, or a machine does not see the folders. Parts that are done are kept.
    """
    machines = _Machines(config)
    try:
        members = machines.start(request)
        missing = parts.missing()
        shares = {member: missing[number :: len(members)] for number, member in enumerate(members)}
        machines.sample({member: share for member, share in shares.items() if share}, stop, on_work)
    finally:
        machines.close()
    if stop.requested:
        raise RunInterrupted(f"stopped by {stop.name}; {done(parts)}; start it again to resume")


class _Machines:
    """The workers of a generation, from the first to the last."""

    def __init__(self, config: GenerateConfig):
        place = config.placement
        self._config, self._per_node = config, place.devices // place.nodes
        numbers = [divmod(device, self._per_node) for device in range(place.devices)]
        ranks = [
            Rank(rank=device, device=device, node=node, local_device=local)
            for device, (node, local) in enumerate(numbers)
        ]
        size = devices_of_a_copy(config)
        self._group = RoleGroup(roles=("rollout",), ranks=tuple(ranks), together=False, share=size)
        self._cluster = Cluster(
            place.ray_address,
            workers=place.devices,
            object_store_bytes=STORE_BYTES,
            start_timeout_s=place.start_timeout_s,
        )
        self._cuda = place.device == "cuda" or (place.device == "auto" and self._cluster.amount("GPU") >= place.devices)
        self._watch = Watch(self._cluster, Notices(), None)

    def start(self, request: Any) -> list[Member]:
        """Start all workers. Returns: those that sample parts, one for each copy."""
        place, group = self._config.placement, self._group
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if self._cuda else {})
        self._reserved = self._cluster.reserve([[bundle] * self._per_node] * place.nodes, place.start_timeout_s)
        self._watch.start()
        threads = place.cpu_threads or max(1, available_cores() // max(1, self._per_node // group.share))
        assignment = CopyAssignment(
            config=self._config.model_dump_json(),
            request=request,
            folder=os.getcwd(),
            node="",
            threads=threads,
            cuda=self._cuda,
        )
        leading, starting = [], {}
        for first in group.leading:
            heads, visible = [], {}
            for ranks in group.machines(first):
                head, *others = self._spawn(ranks if self._cuda else ranks[:1], threads)
                heads.append(head)
                visible[head] = ",".join(self._devices_of([head, *others])) if others else ""
            leading.append(heads[0])
            for member, span in places_of(heads[0], heads[1:], self._watch):
                own = replace(assignment, node=member.process.host, visible=visible[member], span=span)
                starting[member] = self._cluster.call(member.handle, "begin", START, own)
        self._watch.wait(starting, "loading the model", place.start_timeout_s)
        return leading

    def sample(self, shares: dict[Member, list[int]], stop: StopSignal, on_work: OnWork) -> None:
        """Have copies sample their parts. A signal that asks to stop ends them at their next token."""
        asked = {
            member: self._cluster.call(member.handle, "call", "sample", True, share) for member, share in shares.items()
        }
        told, seen = False, (0, 0)

        def moved() -> bool:
            nonlocal told, seen
            if stop.requested and not told:
                told = True
                for member in asked:
                    self._cluster.call(member.handle, "give_up")
            rows, tokens = (
                sum(member.take_sequences() for member in asked),
                sum(member.take()[0] for member in asked),
            )
            if rows or tokens:
                seen = seen[0] + rows, seen[1] + tokens
                on_work(rows, tokens)
            return bool(rows or tokens)

        found = self._watch.wait(asked, "sampling", self._config.placement.call_timeout_s, moved=moved)
        if all(found.values()):  # workers are polled now and then: the rest of what they have done
            rows, tokens = (sum(counts) for counts in zip(*found.values(), strict=True))
            on_work(rows - seen[0], tokens - seen[1])

    def close(self) -> None:
        self._watch.close()
        self._cluster.close()

    def _spawn(self, ranks: Sequence[Rank], threads: int) -> list[Member]:
        environment, gpus = worker_environment(threads, self._cuda), 1.0 if self._cuda else 0.0
        handles = launch(
            self._cluster, self._reserved, self._group, ranks, gpus=lambda rank: gpus, environment=environment
        )
        timeout_s = self._config.placement.start_timeout_s
        return supervised(self._cluster, self._watch, self._group, ranks, handles, timeout_s=timeout_s)

    def _devices_of(self, members: Sequence[Member]) -> list[str]:
        asked = {member: self._cluster.call(member.handle, "devices") for member in members}
        found = self._watch.wait(asked, "finding devices", 60.0)
        return [found[member] for member in members]


def start_copy(outbox: Outbox, assignment: CopyAssignment) -> GenerationCopy:
    """Load the model of one copy, or start the processes of its server on this machine. Raises: RequestError; RunStopped."""
    return GenerationCopy(outbox, assignment)


class GenerationCopy:
    """A copy of the sampler in a worker, and the method that the driver calls."""

    def __init__(self, outbox: Outbox, assignment: CopyAssignment):
        if not Path(assignment.folder).is_dir():
            where = "a folder on a file system that all machines of the generation share"
            raise RunStopped(f"{assignment.node} does not see {assignment.folder}; start the generation in {where}")
        os.chdir(assignment.folder)
        if assignment.visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = assignment.visible
        torch.set_num_threads(assignment.threads)
        config = GenerateConfig.model_validate_json(assignment.config)
        alone = {
            "devices": 1,
            "nodes": 1,
            "device": "cuda" if assignment.cuda else "cpu",
            "cpu_threads": assignment.threads,
        }
        config = config.model_copy(update={"placement": config.placement.model_copy(update=alone)})
        self._outbox, self._config = outbox, config
        import_modules(config.model.external_modules)
        tokenizer = load_tokenizer(config.model)
        self._engine, _ = start_sampler(config, tokenizer, span=assignment.span)
        if isinstance(self._engine, Follower):
            return
        self._prompts = load_generation(
            config.data, tokenizer, load_processor(config.model, tokenizer, config.data)
        ).prompts
        self._parts = Parts(
            Path(config.output.file),
            assignment.request,
            column=config.output.column,
            rows=len(self._prompts),
            rows_per_part=config.output.rows_per_part,
        )

    def failed(self) -> None:
        """No-op: the driver reports what has failed."""

    def sample(self, parts: list[int]) -> tuple[int, int]:
        """Sample and write these parts. Returns: rows and tokens. Raises: GivenUp where the driver has given up; RunStopped."""
        rollout, done = self._config.rollout, (0, 0)

        def on_work(rows: int, tokens: int) -> None:
            nonlocal done
            done = done[0] + rows, done[1] + tokens
            self._outbox.add_sequences(rows)
            self._outbox.add_tokens(tokens)

        sampling = sampling_params(rollout, rollout.max_response_tokens, self._config.run.seed)
        # The driver hears signals, and gives up
        quiet = StopSignal()
        generate.run(self._engine, self._prompts, sampling, self._parts, stop=quiet, on_work=on_work, only=parts)
        return done
