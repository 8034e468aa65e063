"""Start the workers of a run, from the placement plan to its roles as the loop calls them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.runtime.ray.assignment import START_ROLES, WorkerAssignment
from posttrain.backends.runtime.ray.cluster import Cluster, worker_environment
from posttrain.backends.runtime.ray.crew import RayCrew
from posttrain.backends.runtime.ray.endpoints import EndpointSync
from posttrain.backends.runtime.ray.launching import launch, supervised
from posttrain.backends.runtime.ray.profiling import RayProfiler
from posttrain.backends.runtime.ray.proxies import (
    RemoteCritic,
    RemotePolicy,
    RemoteRewardLearner,
    RemoteRewardModel,
    RemoteScorer,
    RowWorkers,
    remote_process_reward,
)
from posttrain.backends.runtime.ray.role_groups import RoleGroup, groups_of
from posttrain.backends.runtime.ray.rollout import RemoteRollout
from posttrain.backends.runtime.ray.shelf import Shelf, step_bytes
from posttrain.backends.runtime.ray.spans import places_of, with_reaching_sync
from posttrain.backends.runtime.ray.sync import SeparateSync, SharedSync, Way, send_of
from posttrain.backends.runtime.ray.watch import Member, Watch
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.backends.serving.start import make_sampler, ranks_per_copy
from posttrain.backends.serving.thread_crew import crew_of_servers
from posttrain.backends.torch_training.start_teachers import asked_before, served_teachers
from posttrain.config import RunConfig, TrainingConfig, TuneConfig
from posttrain.config.distillation import ROLE
from posttrain.config.judge import judge_role
from posttrain.config.roles import needs_ref_logprobs, teachers_of
from posttrain.config.served_model import REWARD_SERVER
from posttrain.errors import ConfigError
from posttrain.interfaces.crew import Crew
from posttrain.interfaces.roles import Learner, Roles, Tuned
from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.interfaces.train_engine import TeacherEngine
from posttrain.interfaces.weight_sync import WeightSync
from posttrain.libraries.cores import available_cores
from posttrain.plan.engine import engine_plan, teacher_engine
from posttrain.plan.placement import PlacementPlan, Rank
from posttrain.plan.roles import place
from posttrain.records.batch_plans import BatchPlan, SftBatchPlan
from posttrain.records.notices import Notices
from posttrain.registry import ROLLOUT_ENGINES

S = TypeVar("S", Roles, Learner, Tuned)
OBJECT_STORE_BYTES = 256 << 20  # of a cluster of this run's own, besides a step and two buckets of weights


def started(
    config: TrainingConfig,
    batches: BatchPlan | SftBatchPlan,
    tokenizer: PreTrainedTokenizerBase,
    speak: Callable[[_Start], S],
) -> S:
    """Start the workers. Args: ``speak`` makes the roles of them. Raises: as ``Ray.start``; nothing stays behind then."""
    plan, problems = place(config)
    if plan is None:
        raise ConfigError(problems)
    start = _Start(with_reaching_sync(config, plan), batches, tokenizer, plan)
    try:
        return speak(start)
    except BaseException:  # also a signal: nothing of it may stay
        start.close()
        raise


class _Start:
    """The workers of a run, from the first to the last."""

    def __init__(
        self,
        config: TrainingConfig,
        batches: BatchPlan | SftBatchPlan,
        tokenizer: PreTrainedTokenizerBase,
        plan: PlacementPlan,
    ):
        self.config, self.batches, self.tokenizer, self.plan = config, batches, tokenizer, plan
        self.followers: dict[str, list[Member]] = {}  # on further machines of a copy, by the name of a sampler's worker
        place = config.placement
        self.groups = groups_of(plan)
        self.held: dict[str, tuple[str, ...]] = {}  # devices besides its own, by the name of a sampler's worker
        self.notices = Notices()
        workers_on: dict[int, int] = {}
        for rank in (rank for group in self.groups for rank in group.ranks):
            workers_on[rank.device] = workers_on.get(rank.device, 0) + 1
        self.workers_on = workers_on
        room = OBJECT_STORE_BYTES
        if isinstance(config, RunConfig) and isinstance(batches, BatchPlan):
            room += 2 * config.rollout.weight_bucket_mib << 20
            asynchronous = config.asynchronous
            ahead = 0.0 if asynchronous.mode == "off" else 1.0 + asynchronous.max_staleness_steps
            room += step_bytes(batches.sequences_per_step, config.context_tokens, ahead)
        self.cluster = Cluster(
            place.ray_address,
            workers=sum(workers_on.values()),
            object_store_bytes=room,
            start_timeout_s=place.start_timeout_s,
        )
        gpus = self.cluster.amount("GPU")
        self.cuda = place.device == "cuda" or (place.device == "auto" and gpus >= plan.devices)
        self.shelf = Shelf(self.cluster.put)
        self.folder = Path(config.folder).resolve()
        self.watch = Watch(self.cluster, self.notices, self.folder / "workers")

    def close(self) -> None:
        self.watch.close()
        self.cluster.close()

    def worker_groups(self) -> dict[str, WorkerGroup]:
        """The workers of every group by its name, with their models loaded."""
        timeout_s = self.config.placement.start_timeout_s
        per_node = self.plan.devices_per_node
        bundles = [
            [self._bundle(device) for device in range(node * per_node, (node + 1) * per_node)]
            for node in range(self.plan.nodes)
        ]
        self.reserved = self.cluster.reserve(bundles, timeout_s)
        self.watch.start()
        # They start side by side
        launched = [(group, self._launch(group, group.leading)) for group in self.groups]
        worker_groups = {
            group.name: self._workers(group, self._arrived(group, group.leading, handles))
            for group, handles in launched
        }
        for group in self.groups:
            self._reach_out(group)
            self._hold(group)
        starting: dict[Member, Any] = {}
        for group in self.groups:
            starting |= self._begin(group, worker_groups[group.name].members)
        self.watch.wait(starting, "loading the models", timeout_s)
        return worker_groups

    def renew(self, sync: SeparateSync, lost: Member, send: bool) -> Member:
        """A new worker in the place of a lost sampler."""
        group = self.groups[-1]
        rank = next(each for each in group.leading if lost.name == group.worker(each))
        self.watch.remove(lost)
        (member,) = self._spawn(group, [rank])
        started = self._begin(group, [member])
        self.watch.wait(started, f"starting {member.name} again", self.config.placement.start_timeout_s)
        if send:
            sync.send_to(member)
        return member

    def _bundle(self, device: int) -> dict[str, float]:
        bundle = {"CPU": float(max(1, self.workers_on.get(device, 0)))}
        return bundle | ({"GPU": 1.0} if self.cuda else {})

    def _threads(self) -> int:
        """Threads of each worker on a CPU: the cores of a node are divided among its workers."""
        per_node = max(1, sum(self.workers_on.values()) // self.plan.nodes)
        return self.config.placement.cpu_threads or max(1, available_cores() // per_node)

    def _spawn(self, group: RoleGroup, ranks: Sequence[Rank]) -> list[Member]:
        return self._arrived(group, ranks, self._launch(group, ranks))

    def _launch(self, group: RoleGroup, ranks: Sequence[Rank]) -> list[Any]:
        """Have Ray start the processes of ranks. Returns: their handles, at once."""
        return launch(
            self.cluster,
            self.reserved,
            group,
            ranks,
            gpus=lambda rank: 1 / self.workers_on[rank.device] if self.cuda else 0,
            environment=worker_environment(self._threads(), self.cuda),
        )

    def _arrived(self, group: RoleGroup, ranks: Sequence[Rank], handles: Sequence[Any]) -> list[Member]:
        """Wait until launched processes run, and supervise them."""
        # Of a group in which none is started again
        vital = group.together or group.spans_nodes or REWARD_SERVER in group.roles
        timeout_s = self.config.placement.start_timeout_s
        return supervised(self.cluster, self.watch, group, ranks, handles, timeout_s=timeout_s, vital=vital)

    def _reach_out(self, group: RoleGroup) -> None:
        """Start a worker on every further machine of a copy of the sampler, for the processes of its server there."""
        for first in group.leading if group.spans_nodes else ():
            self.followers[group.worker(first)] = self._spawn(group, [ranks[0] for ranks in group.machines(first)[1:]])

    def _hold(self, group: RoleGroup) -> None:
        """Reserve the devices of a shared copy on GPUs with idle workers: Ray gives a process those of one bundle."""
        machines = [ranks for first in group.leading for ranks in group.machines(first)]
        for first, *further in machines if self.cuda and group.share > 1 else ():
            self.held[group.worker(first)] = self._devices_of(self._spawn(group, further))

    def _visible(self, member: Member) -> str:
        """The devices of a copy that several share, its own first."""
        if not (others := self.held.get(member.name)):
            return ""
        return ",".join((*self._devices_of([member]), *others))

    def _devices_of(self, members: Sequence[Member]) -> tuple[str, ...]:
        asked = {member: self.cluster.call(member.handle, "devices") for member in members}
        return tuple(self.watch.wait(asked, "finding devices", 60.0).values())

    def _begin(self, group: RoleGroup, members: Sequence[Member]) -> dict[Member, Any]:
        """Promises that the models are loaded."""
        meeting = None
        if group.together:
            first = members[0]
            meeting = first.process.host, self.watch.free_port(first)
        assignment = WorkerAssignment(
            kind=type(self.config),
            config=self.config.model_dump_json(),
            batches=self.batches,
            roles=group.roles,
            rank=0,
            ranks=len(members) if group.together else 1,
            meeting=meeting,
            node="",
            cuda=self.cuda,
            threads=self._threads(),
            timeout_s=self.config.placement.call_timeout_s,
            folders=(str(self.folder), os.getcwd()),
        )
        places = [
            (rank, *place)
            for rank, member in enumerate(members)
            for place in places_of(member, self.followers.get(member.name, []), self.watch)
        ]
        return {
            member: self.cluster.call(
                member.handle,
                "begin",
                START_ROLES,
                replace(
                    assignment,
                    rank=rank if group.together else 0,
                    node=member.process.host,
                    visible=self._visible(member),
                    span=span,
                ),
            )
            for rank, member, span in places
        }

    def _workers(self, group: RoleGroup, members: list[Member]) -> WorkerGroup:
        return WorkerGroup(
            cluster=self.cluster,
            watch=self.watch,
            members=members,
            timeout_s=self.config.placement.call_timeout_s,
            shelf=self.shelf,
        )

    def learner(self) -> Learner:
        worker_groups = self.worker_groups()
        of = {role: worker_groups[group.name] for group in self.groups for role in group.roles}
        trainers = of["policy"]
        return Learner(
            policy=RemotePolicy(trainers),
            teachers=self._teachers(of),
            device=self._device(),
            notices=self.notices,
            notes=_notes(worker_groups),
            profiler=RayProfiler({"policy": trainers}, self.cuda),
            close=self.close,
        )

    def tuned(self, config: TuneConfig) -> Tuned:
        worker_groups = self.worker_groups()
        of = {role: worker_groups[group.name] for group in self.groups for role in group.roles}
        trainers = of["policy"]
        return Tuned(
            engine=RemoteRewardLearner(trainers, "policy") if config.method.scored else RemotePolicy(trainers),
            reference=self._reference(of["reference"], config) if "reference" in of else None,
            device=self._device(),
            notices=self.notices,
            notes=_notes(worker_groups),
            profiler=RayProfiler(of, self.cuda),
            close=self.close,
        )

    def _reference(self, workers: WorkerGroup, config: RunConfig | TuneConfig) -> RemoteScorer:
        return RemoteScorer(workers, "reference", copies=engine_plan(config.policy.engine).keeps_whole)

    def _teachers(self, of: Mapping[str, WorkerGroup]) -> dict[str, TeacherEngine]:
        """Return the teachers that give their answers before an update, by name."""
        kept = {role: engine_plan(teacher_engine(self.config, role)).keeps_whole for role in teachers_of(self.config)}
        workers: dict[str, TeacherEngine] = {
            role.removeprefix(ROLE): RemoteScorer(of[role], role, copies=copies) for role, copies in kept.items()
        }
        return asked_before(self.config, workers, served_teachers(self.config, self.tokenizer))

    def roles(self) -> Roles:
        config = self.config
        assert isinstance(config, RunConfig)
        worker_groups = self.worker_groups()
        of = {role: worker_groups[group.name] for group in self.groups for role in group.roles}
        trainers = of["policy"]
        rollout, sync = self._sampling(config, trainers, of.get("rollout"))
        crew = self._crew(config, rollout, sync) if config.asynchronous.mode == "separate" else None
        asks_reference = "reference" in of and needs_ref_logprobs(config)
        return Roles(
            policy=RemotePolicy(trainers),
            rollout=rollout,
            weight_sync=sync,
            crew=crew,
            over_rows=RowWorkers(trainers),
            read_rows=RowWorkers(trainers).read,
            beside=rollout if isinstance(rollout, RemoteRollout) and rollout.workers is not trainers else None,
            reference=self._reference(of["reference"], config) if asks_reference else None,
            teachers=self._teachers(of),
            critic=RemoteCritic(of["critic"], "critic") if "critic" in of else None,
            process_reward=remote_process_reward(trainers) if config.reward.process else None,
            reward_servers=tuple(of[REWARD_SERVER].each("served_at")) if REWARD_SERVER in of else (),
            reward_model=RemoteRewardModel(of["reward model"]) if "reward model" in of else None,
            judges={
                name: RemoteRewardModel(of[judge_role(name)], judge_role(name), reads_references=True)
                for name in config.reward.judges
            },
            device=self._device(),
            notices=self.notices,
            notes=_notes(worker_groups),
            profiler=RayProfiler(of, self.cuda),
            close=self.close,
        )

    def _sampling(
        self, config: RunConfig, trainers: WorkerGroup, samplers: WorkerGroup | None
    ) -> tuple[RolloutEngine, WeightSync]:
        """The sampler, and how the weights get to it. ``samplers`` is None for servers that run already."""
        if samplers is trainers:
            in_lockstep = config.asynchronous.mode == "colocate"
            return RemoteRollout(trainers, self.notices, None, in_lockstep=in_lockstep), SharedSync(trainers)
        way = Way(
            bucket_bytes=config.rollout.weight_bucket_mib << 20,
            folder=Path(config.rollout.weight_folder or self.folder).expanduser().resolve(),
            ranks_per_sampler=ranks_per_copy(config.rollout),
            adapter=trainers.call("sender.settings"),
        )
        if samplers is not None:
            separate = SeparateSync(trainers, send_of(config.rollout.weight_sync), way)
            return RemoteRollout(samplers, self.notices, partial(self.renew, separate)), separate
        servers = make_sampler(
            config.rollout,
            config.model,
            _no_module,
            self.tokenizer,
            device=torch.device("cuda" if self.cuda else "cpu"),
            seed=config.run.seed,
            max_prompt_tokens=config.context_tokens,
            lora=config.policy.lora,
        )
        backend = "nccl" if self.cuda else "gloo"
        broadcasts = config.rollout.weight_sync == "collective"
        sync: Any = EndpointSync(trainers, way, backend=backend if broadcasts else None)
        return servers, sync

    def _crew(self, config: RunConfig, rollout: Any, sync: WeightSync) -> Crew:
        """The samplers as a crew; servers that run already are one member of it."""
        if not isinstance(sync, SeparateSync):
            return crew_of_servers(config.rollout.engine, rollout, sync)
        return RayCrew(
            rollout,
            sync,
            lambda lost: self.renew(sync, lost, send=False),
            self.notices,
            resumes=ROLLOUT_ENGINES.facts(config.rollout.engine).resumes_responses,
            start_timeout_s=config.placement.start_timeout_s,
        )

    def _device(self) -> str:
        workers = sum(len(group.ranks) for group in self.groups)
        return f"{self.plan.devices} x {'cuda' if self.cuda else 'cpu'}, {workers} workers of Ray"


def _no_module() -> PreTrainedModel:
    raise RuntimeError("a server samples from its own copy of the weights")


def _notes(worker_groups: Mapping[str, WorkerGroup]) -> tuple[str, ...]:
    return tuple(note for workers in worker_groups.values() for note in workers.call("notes"))
