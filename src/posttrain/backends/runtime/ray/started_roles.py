"""Start the roles of one worker: load their models, join those of other ranks, and connect sampler and policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn import Parameter
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.runtime.ray.assignment import WorkerAssignment
from posttrain.backends.runtime.ray.sending import Sender
from posttrain.backends.runtime.ray.serving import Server, server_of
from posttrain.backends.runtime.ray.taking import CopyTaker, ServerTaker, Taker
from posttrain.backends.serving.launch import Follower
from posttrain.backends.serving.start import make_sampler, start_judge
from posttrain.backends.torch_training.resting import Resting, Turns
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.torch_training.start import (
    load_policy,
    start_critic,
    start_policy,
    start_reference,
    start_reward_model,
    start_sft_policy,
)
from posttrain.backends.torch_training.start_process_reward import start_process_reward
from posttrain.backends.torch_training.start_teachers import start_teacher
from posttrain.backends.torch_training.start_tune import start_tuned
from posttrain.config import RunConfig, SftConfig, TrainingConfig, TuneConfig
from posttrain.config.distillation import ROLE
from posttrain.config.judge import judge_role
from posttrain.config.process_reward import PROCESS_REFERENCE, PROCESS_REWARD
from posttrain.config.roles import compares_vocabularies, learner_of, sends_adapter, shares_weights, teachers_of
from posttrain.config.served_model import REWARD_SERVER
from posttrain.interfaces.roles import ProcessRewardModel
from posttrain.models.loading import DTYPES
from posttrain.plan.engine import engine_plan, is_split_as_policy, teacher_engine
from posttrain.plan.roles import leaves
from posttrain.records.batch_plans import BatchPlan, SftBatchPlan
from posttrain.records.notices import Notices
from posttrain.registry import TRAIN_ENGINES


@dataclass(slots=True, eq=False)
class StartedRoles:
    """The roles of a worker, and what moves weights between them."""

    engines: dict[str, Any] = field(default_factory=dict)  # by role
    policy_model: PreTrainedModel | None = None  # as it is loaded, before an engine wraps it
    copy: PreTrainedModel | None = None  # a module that is sampled from, where it is not the policy's own
    arriving: dict[str, Parameter] = field(default_factory=dict)  # the copy's weights that change
    sender: Sender | None = None  # in a worker with the policy
    taker: Taker | None = None  # in a worker with a sampler that has its own weights
    server: Server | None = None  # beside the sampler, or of a model that reward functions ask
    served_at: str = ""  # HOST:PORT of the latter
    turns: Turns = field(default_factory=lambda: Turns({}))
    notes: list[str] = field(default_factory=list)

    def take_turn(self, *roles: str) -> None:
        """Bring the models of these roles to the device, and others that leave it to CPU memory."""
        self.turns.take(*roles)

    def take_turn_to_send(self) -> None:
        """Bring the policy to the device, with the sampler's copy where it is in this process."""
        self.turns.take(*(("policy", "rollout") if self.copy is not None else ("policy",)))


class Starter:
    """Starts the roles of one worker. Raises: RequestError for what is wrong with their models."""

    def __init__(
        self, config: TrainingConfig, assignment: WorkerAssignment, tokenizer: PreTrainedTokenizerBase, notices: Notices
    ):
        self.config, self.assignment, self.tokenizer, self.notices = config, assignment, tokenizer, notices
        self.device = torch.device("cuda" if assignment.cuda else "cpu")
        self.started = StartedRoles()

    def start(self) -> StartedRoles:
        """Start every role that this worker is assigned."""
        if self.assignment.meeting:
            self._meet(*self.assignment.meeting)
        config, batches, engines = self.config, self.assignment.batches, self.started.engines
        if "policy" not in self.assignment.roles:
            self._start_teachers()
        if not isinstance(config, RunConfig):
            assert isinstance(batches, SftBatchPlan)
            self._start_on_rows(config, batches)
            return self.started
        assert isinstance(batches, BatchPlan)
        roles = self.assignment.roles
        if "policy" in roles:
            self._start_policy(config, batches)
        elif "reference" in roles:
            engines["reference"] = start_reference(config, self.device, None, self._sharding_of("policy"))
        if "critic" in roles:
            sharding = self._sharding_of("critic")
            engines["critic"] = start_critic(config, batches, self.tokenizer, self.device, self.notices, sharding)
        if "reward model" in roles:
            engines["reward model"] = start_reward_model(
                config, self.tokenizer, self.device, self._shards_of_scorer(config)
            )
        for name, judge in config.reward.judges.items():
            if judge_role(name) in roles:
                engines[judge_role(name)] = start_judge(config, name, judge, self.device)
        if REWARD_SERVER in roles:
            self._start_reward_server(config)
        if "rollout" in roles:
            self._start_rollout(config)
        self._choose_turns()
        return self.started

    def _start_on_rows(self, config: SftConfig, batches: SftBatchPlan) -> None:
        """Start the roles of a run that samples nothing: supervised fine-tuning, or tuning with its reference."""
        engines = self.started.engines
        policy: PreTrainedModel | None = None
        sharding: Sharding | None = None
        if "policy" in self.assignment.roles:
            policy, sharding = self._load_policy()
            how = (self.tokenizer, policy, self.notices, sharding)
            if isinstance(config, TuneConfig):
                engines["policy"] = start_tuned(config, batches, *how)
            else:
                self._start_teachers()
                engines["policy"] = start_sft_policy(config, batches, *how, teachers=self._beside())
        if "reference" in self.assignment.roles:
            assert isinstance(config, TuneConfig), "supervised fine-tuning has no reference"
            # The policy without its adapter is computed as the policy is, by the engine that gathers its weights.
            shards = sharding if policy is not None else self._sharding_of("policy")
            engines["reference"] = start_reference(config, self.device, policy, shards)
        self._choose_turns()

    def _meet(self, address: str, port: int) -> None:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.assignment.cuda else "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=self.assignment.rank,
            world_size=self.assignment.ranks,
            timeout=timedelta(seconds=self.assignment.timeout_s),
        )

    def _sharding_of(self, role: str) -> Sharding | None:
        """Return how the role's engine splits a model over this group; None where it does not."""
        engine, compute = learner_of(self.config, role).engine, DTYPES[self.config.model.compute_dtype]
        sharding: Sharding | None = TRAIN_ENGINES.get(engine).sharding_of(self.config, role, self.device, compute)
        return sharding

    def _shards_of_scorer(self, config: RunConfig) -> Sharding | None:
        """Return how the reward model is split over this group; None where every rank has all of it."""
        model = config.reward.model
        if model is None or not engine_plan(model.engine).shares_out or self.assignment.ranks < 2:
            return None
        compute = DTYPES[config.model.compute_dtype]
        sharding: Sharding = TRAIN_ENGINES.get(model.engine).sharding_of(config, "reward model", self.device, compute)
        return sharding

    def _load_policy(self) -> tuple[PreTrainedModel, Sharding | None]:
        """Load the model that is trained, whole, and return it with the way it is going to be split."""
        config, sharding = self.config, self._sharding_of("policy")
        masters = DTYPES[config.model.master_dtype]
        first = torch.device("cpu") if sharding and sharding.starts_on_cpu else self.device
        model, _ = load_policy(config, first, dtype=masters if sharding else None)
        self.started.policy_model = model
        self.started.sender = Sender(
            model,
            sharding or Sharding(),
            DTYPES[config.model.compute_dtype],
            to_copies=not isinstance(config, RunConfig) or shares_weights(config.rollout.engine),
            adapter=isinstance(config, RunConfig) and sends_adapter(config.rollout, config.policy.lora),
            device=self.device,
            rank=self.assignment.rank,
            timeout_s=self.assignment.timeout_s,
            describe=partial(_describe, model, self.tokenizer),
            wake=self.started.take_turn_to_send,
        )
        return model, sharding

    def _start_policy(self, config: RunConfig, batches: BatchPlan) -> None:
        model, sharding = self._load_policy()
        self._start_teachers()
        if (process := self._start_process_reward(config, batches)) is not None:
            self.started.engines |= {PROCESS_REWARD: process.engine, PROCESS_REFERENCE: process.reference}
        policy, reference = start_policy(
            config,
            batches,
            self.tokenizer,
            model,
            self.notices,
            sharding,
            with_reference="reference" in self.assignment.roles or compares_vocabularies(config),
            teachers=self._beside(),
        )
        self.started.engines["policy"] = policy
        if reference is not None:
            self.started.engines["reference"] = reference

    def _start_process_reward(self, config: RunConfig, batches: BatchPlan) -> ProcessRewardModel | None:
        """Start the model that is trained to reward tokens, with its reference, beside the policy."""
        if config.reward.process is None:
            return None
        sharding = self._sharding_of(PROCESS_REWARD)
        return start_process_reward(config, batches, self.tokenizer, self.device, self.notices, sharding)

    def _start_teachers(self) -> None:
        known = teachers_of(self.config)
        roles = [role for role in self.assignment.roles if role in known]
        if not roles:  # a worker without a learner may belong to no group of processes
            return
        # All are on the devices of this group, and so split in the same way
        as_policy = is_split_as_policy(self.config, roles[0])
        sharding = self._sharding_of("policy") if as_policy else self._shards_of_teacher(roles[0])
        for role in roles:
            self.started.engines[role] = start_teacher(self.config, role, self.tokenizer, self.device, sharding)

    def _shards_of_teacher(self, role: str) -> Sharding | None:
        """Return how a teacher is split that is not split as the policy is."""
        engine, compute = teacher_engine(self.config, role), DTYPES[self.config.model.compute_dtype]
        sharding: Sharding | None = TRAIN_ENGINES.get(engine).sharding_of(self.config, role, self.device, compute)
        return sharding

    def _beside(self) -> dict[str, LogprobScorer]:
        """Return the teachers that are computed inside the policy's forward pass, by name."""
        if not self.config.distillation.beside_the_student:
            return {}
        engines = self.started.engines
        return {role.removeprefix(ROLE): engines[role] for role in teachers_of(self.config) if role in engines}

    def _start_reward_server(self, config: RunConfig) -> None:
        """Start a copy of the model that reward functions ask. The driver must reach it from its own machine."""
        from posttrain.backends.serving.reward_server import start_reward_server

        assert config.reward.served is not None
        host = self.assignment.node if config.placement.nodes > 1 else "127.0.0.1"
        cuda = self.device.type == "cuda"
        launched = start_reward_server(config, config.reward.served, cuda=cuda, host=host)
        self.started.served_at, self.started.server = launched.address, Server(launched)

    def _start_rollout(self, config: RunConfig) -> None:
        """Start the sampler. It reads the policy's weights where this process has all of them, and otherwise a copy: a module
        here, or a server's."""
        started, model = self.started, self.started.policy_model
        reads_weights = shares_weights(config.rollout.engine)
        if reads_weights and (model is None or not engine_plan(config.policy.engine).keeps_whole):
            model = started.copy = load_policy(config, self.device)[0]
            started.arriving = {name: each for name, each in model.named_parameters() if each.requires_grad}
            model.requires_grad_(False)
        sampler: Any = make_sampler(
            config.rollout,
            config.model,
            lambda: cast(PreTrainedModel, model),
            self.tokenizer,
            device=self.device,
            seed=config.run.seed,
            max_prompt_tokens=config.context_tokens,
            lora=config.policy.lora,
            image_options=config.data.image_options,
            span=self.assignment.span,
        )
        started.server = server_of(sampler)
        if isinstance(sampler, Follower):  # requests and weights reach it through its server on another machine
            return
        started.engines["rollout"] = sampler
        where: dict[str, Any] = {"device": self.device, "timeout_s": self.assignment.timeout_s}
        if not reads_weights:
            started.taker = ServerTaker(sampler, **where)
        elif started.copy is not None:
            started.taker = CopyTaker(sampler, started.arriving, **where)

    def _choose_turns(self) -> None:
        """Let models leave the device while others work on it: those that the configuration says, and with the policy a sampler's
        copy beside it. On the CPU there is nowhere to go."""
        engines, copy = self.started.engines, self.started.copy
        leaving = [
            role for role in ("policy", "critic", PROCESS_REWARD) if role in engines and leaves(self.config, role)
        ]
        if self.device.type == "cpu":
            names = ", ".join(f"{role}.engine_options.param_offload" for role in leaving)
            self.started.notes += [f"no effect of {names}: everything is on the CPU already"] if leaving else []
            return
        resting: dict[str, Resting] = {role: Resting(engines[role].model.parameters) for role in leaving}
        lenders = {}
        if "policy" in resting:
            reference = engines.get("reference")
            if reference is not None and reference.model is engines["policy"].model:
                lenders["reference"] = "policy"
            if copy is not None:
                resting["rollout"] = Resting(copy.parameters)
        self.started.turns = Turns(resting, lenders)


def _describe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files that servers read beside weights."""
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
