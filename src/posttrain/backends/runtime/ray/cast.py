"""What lives in a worker: one rank of the roles that share its devices, or one copy of the sampler apart from them.

The driver calls the methods of ``Cast``, and those of its ``sender`` and ``taker`` of weights, by name. Every rank of a group
gets the same calls in the same order, so that what they do together (gather weights, add up gradients) meets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from posttrain.backends.runtime.ray.sending import Sender
from posttrain.backends.runtime.ray.serving import Server, server_of
from posttrain.backends.runtime.ray.taking import CopyTaker, ServerTaker, Taker
from posttrain.backends.runtime.ray.wire import from_plain, to_plain
from posttrain.backends.runtime.ray.worker import Groups, Outbox
from posttrain.backends.serving.start import make_sampler
from posttrain.backends.torch_training.resting import Resting, Turns
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.torch_training.start import (
    has_full_kl,
    load_policy,
    start_critic,
    start_policy,
    start_reference,
    start_reward_model,
    start_sft_policy,
)
from posttrain.config import RunConfig, SftConfig, TrainingConfig
from posttrain.config.roles import learner_of, sends_adapter, shares_weights
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import Request, RolloutEngine, Served
from posttrain.models.loading import DTYPES, import_modules, load_tokenizer
from posttrain.models.weight_transfer import Manifest, entry_of, manifest_of
from posttrain.plan.roles import leaves
from posttrain.records.batches import LossCounts
from posttrain.records.notices import Notices
from posttrain.records.plans import BatchPlan, LossPlan, SftBatchPlan, ValueLossPlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, Trajectory, TrajectoryGroup
from posttrain.run.profile import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a worker is told about itself, in plain values."""

    kind: type[RunConfig] | type[SftConfig]
    config: str  # of that kind, as JSON
    batches: BatchPlan | SftBatchPlan
    roles: tuple[str, ...]
    rank: int  # in its group
    ranks: int
    meeting: tuple[str, int] | None  # address and port of rank 0, for torch.distributed; None: the group has one rank
    cuda: bool
    threads: int  # of the CPU
    node: str  # its address, for messages
    timeout_s: float  # of what the ranks do together
    folders: tuple[str, str]  # of the run, and the one in which relative paths begin: every node must see them
    visible: str = ""  # the devices of a copy that several share, as CUDA_VISIBLE_DEVICES; "": this worker's own


def make_cast(outbox: Outbox, part: Part) -> Cast:
    """Load the models of this rank. Raises: RequestError for what is wrong with them; RunStopped."""
    return Cast(outbox, part)


class Cast:
    """See the module."""

    def __init__(self, outbox: Outbox, part: Part):
        config: TrainingConfig = part.kind.model_validate_json(part.config)
        self.config, self.outbox, self.part = config, outbox, part
        if part.visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = part.visible
        torch.set_num_threads(part.threads)
        disable_progress_bar()  # every line that is printed here goes to the driver
        self.device = torch.device("cuda" if part.cuda else "cpu")
        self._enter_folders()
        import_modules(config.model.external_modules)
        self.notices = Notices()
        self.recording = Recording()  # of a profile; the driver calls it by name, too
        self.tokenizer = load_tokenizer(config.model)
        self.roles: dict[str, Any] = {}
        self._model: PreTrainedModel | None = None  # that is trained
        self._copy: PreTrainedModel | None = None  # that is sampled from, where it is another
        self._writers: dict[str, Callable[[Path], None]] = {}
        self.sender: Sender  # in a worker with the policy
        self.taker: Taker  # in a worker with a sampler
        self._server: Server | None = None  # beside the sampler
        if part.meeting:
            self._meet(*part.meeting)
        self.turns = Turns({})
        self._told_once: list[str] = []
        if isinstance(config, RunConfig):
            assert isinstance(part.batches, BatchPlan)
            self._start_roles(config, part.batches)
            self._take_turns(config)
        else:
            assert isinstance(part.batches, SftBatchPlan)
            self._start_learner(config, part.batches)

    # ---------------------------------------------------------------------------------------------- what the driver calls

    def notes(self) -> list[str]:
        """For people: how roles are computed, where it is not the usual way."""
        return [role.note for role in self.roles.values() if getattr(role, "note", None)] + self._told_once

    def failed(self) -> None:
        """A call has raised an error, which is told after this."""
        if self._server is not None:
            self._server.doubt()

    def model_call(self, role: str, method: str) -> Any:
        """A method of a model's engine that takes nothing."""
        self.turns.take(role)
        return getattr(self.roles[role], method)()

    def score(self, batch: Any, role: str, method: str, *arguments: float) -> Any:
        """A method that gives [B, T] for a SequenceBatch; both as plain values."""
        self.turns.take(role)
        return self._told(getattr(self.roles[role], method)(from_plain(batch), *arguments))

    def learn(self, batch: Any, role: str, loss: LossPlan | ValueLossPlan, counts: LossCounts) -> Any:
        """Forward and backward over a TrainBatch; the batch and the result as plain values."""
        self.turns.take(role)
        return self._told(self.roles[role].forward_backward(from_plain(batch), loss, counts))

    def save(self, role: str, folder: Path, optimizer: bool) -> None:
        self.turns.take(role)
        self.roles[role].save(folder, optimizer=optimizer)

    def gather(self, role: str, optimizer: bool, sharded: bool) -> None:
        """The first part of saving; ``write`` is the second, beside other work."""
        self.turns.take(role)
        self._writers[role] = self.roles[role].writer(optimizer=optimizer, sharded=sharded)

    def write(self, role: str, folder: Path) -> None:
        self._writers.pop(role)(folder)

    def load(self, role: str, folder: Path, optimizer: bool, schedule: bool) -> None:
        self.turns.take(role)
        self.roles[role].load(folder, optimizer=optimizer, schedule=schedule)

    def version(self, role: str) -> int:
        found: int = self.roles[role].version
        return found

    def reward(self, groups: Sequence[TrajectoryGroup]) -> Any:
        self.turns.take("reward model")
        return self.roles["reward model"].score(groups)

    def generate(self, call: int, prompts: Sequence[tuple[int, Prompt]], sampling: SamplingParams) -> Groups:
        """Sample. Groups go into the outbox as they are done; returned are those that nobody has fetched from there.

        Args: ``call`` is the driver's number of this call, and each prompt has its number in it.
        """
        self.turns.take("rollout")
        numbers = {id(prompt): number for number, prompt in prompts}

        def done(group: TrajectoryGroup) -> None:
            self.outbox.add_group((call, numbers[id(group.prompt)]), group.trajectories)

        self.rollout.generate([prompt for _, prompt in prompts], sampling, self.outbox.add_tokens, done)
        return self.outbox.take_groups()

    def open_stream(self, sampling: SamplingParams) -> None:
        self.turns.take("rollout")
        self._stream = self.rollout.open_stream(sampling, self.outbox.add_tokens)

    def sample(self, requests: Sequence[Request], cancelled: Sequence[str], timeout_s: float) -> list[Trajectory]:
        """Take these requests, drop those, go on for a while: what has ended."""
        if cancelled:
            self._stream.cancel(cancelled)
        if requests:
            self._stream.submit(requests)
        return self._stream.wait(timeout_s)

    def close_stream(self) -> None:
        self._stream.close()

    def share_weights(self, version: int) -> tuple[Served, Served] | None:
        """Give the sampler of this very process the policy's weights: what was sent and what has arrived, by their hashes.

        None where the sampler reads the policy's own tensors.
        """
        if self._copy is not None:
            self.turns.take("policy", "rollout")
            sent = []
            for name, tensor in self.sender.weights():
                sent.append(entry_of(name, tensor))
                self._arriving[name].data.copy_(tensor)
            arrived = manifest_of(self._arriving.items(), version)
            manifest = Manifest(version, tuple(sent))
            served = (
                Served(version, manifest.content_hash, manifest.nbytes),
                Served(version, arrived.content_hash),
            )
        self.rollout.weights_changed(version)
        return None if self._copy is None else served

    # ------------------------------------------------------------------------------------------------------------ inside

    def _take_turns(self, config: RunConfig) -> None:
        """Which models leave the device while others work on it: those that were asked to, and with the policy a sampler's copy
        beside it. On the CPU there is nowhere to go."""
        asked = [role for role in ("policy", "critic") if role in self.roles and leaves(config, role)]
        if self.device.type == "cpu":
            names = ", ".join(f"{role}.engine_options.param_offload" for role in asked)
            self._told_once += [f"no effect of {names}: everything is on the CPU already"] if asked else []
            return
        resting: dict[str, Resting] = {role: Resting(self.roles[role].model.parameters) for role in asked}
        lenders = {}
        if "policy" in resting:
            reference = self.roles.get("reference")
            if reference is not None and reference.model is self.roles["policy"].model:
                lenders["reference"] = "policy"
            if self._copy is not None:
                resting["rollout"] = Resting(self._copy.parameters)
        self.turns = Turns(resting, lenders)

    def _told(self, result: Any) -> Any:
        """A result as a plain value, and what there is to tell people."""
        if self.part.rank == 0:
            self.outbox.add_notices(self.notices.take())
        return to_plain(result)

    @property
    def rollout(self) -> RolloutEngine:
        engine: RolloutEngine = self.roles["rollout"]
        return engine

    def _enter_folders(self) -> None:
        """Raises: RunStopped when this node lacks one: checkpoints are read and written by workers."""
        missing = [folder for folder in self.part.folders if not Path(folder).is_dir()]
        if missing:
            raise RunStopped(
                f"{self.part.node} does not see {' and '.join(missing)}; start the run in a folder, and with a run.folder, on "
                "a file system that all nodes of the run share"
            )
        os.chdir(self.part.folders[1])

    def _meet(self, address: str, port: int) -> None:
        backend = "cpu:gloo,cuda:nccl" if self.part.cuda else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}:{port}",
            rank=self.part.rank,
            world_size=self.part.ranks,
            timeout=timedelta(seconds=self.part.timeout_s),
        )

    def _sharding_of(self, role: str) -> Sharding | None:
        """How this group shares a model out; None for an engine that does not."""
        engine, compute = learner_of(self.config, role).engine, DTYPES[self.config.model.compute_dtype]
        if engine == "megatron":
            from posttrain.backends.train.megatron.sharding import sharding_of

            return sharding_of(self.config, role, self.device, compute)
        if engine == "deepspeed":
            from posttrain.backends.train.deepspeed.sharding import DeepspeedSharding

            return DeepspeedSharding.of_run(self.config, role, self.device.type, compute)
        if engine != "fsdp":
            return None
        from posttrain.backends.train.fsdp.sharding import FsdpSharding

        return FsdpSharding.of_run(self.config, role, self.device.type, compute)

    def _start_learner(self, config: SftConfig, batches: SftBatchPlan) -> None:
        model, sharding = self._load_policy()
        self.roles["policy"] = start_sft_policy(config, batches, self.tokenizer, model, self.notices, sharding)

    def _start_roles(self, config: RunConfig, batches: BatchPlan) -> None:
        if "policy" in self.part.roles:
            self._start_policy(config, batches)
        elif "reference" in self.part.roles:
            self.roles["reference"] = start_reference(config, self.device, None, self._sharding_of("policy"))
        if "critic" in self.part.roles:
            self.roles["critic"] = start_critic(
                config, batches, self.tokenizer, self.device, self.notices, self._sharding_of("critic")
            )
        if "reward model" in self.part.roles:
            self.roles["reward model"] = start_reward_model(config, self.tokenizer, self.device)
        if "rollout" in self.part.roles:
            self._start_rollout(config)

    def _load_policy(self) -> tuple[PreTrainedModel, Sharding | None]:
        """What is trained, whole, and how it is to be shared out."""
        sharding = self._sharding_of("policy")
        masters = DTYPES[self.config.model.master_dtype]
        start = torch.device("cpu") if sharding and sharding.starts_on_cpu else self.device
        model, _ = load_policy(self.config, start, dtype=masters if sharding else None)
        self._model = model
        self.sender = Sender(
            model,
            sharding or Sharding(),
            DTYPES[self.config.model.compute_dtype],
            to_copies=not isinstance(self.config, RunConfig) or shares_weights(self.config.rollout.engine),
            adapter=isinstance(self.config, RunConfig) and sends_adapter(self.config.rollout, self.config.policy.lora),
            device=self.device,
            rank=self.part.rank,
            timeout_s=self.part.timeout_s,
            describe=partial(_describe, model, self.tokenizer),
            wake=lambda: self.turns.take("policy", "rollout") if self._copy is not None else self.turns.take("policy"),
        )
        return model, sharding

    def _start_policy(self, config: RunConfig, batches: BatchPlan) -> None:
        model, sharding = self._load_policy()
        self.roles["policy"], reference = start_policy(
            config,
            batches,
            self.tokenizer,
            model,
            self.notices,
            sharding,
            with_reference="reference" in self.part.roles or has_full_kl(config),
        )
        if reference is not None:
            self.roles["reference"] = reference

    def _start_rollout(self, config: RunConfig) -> None:
        """The sampler reads the policy's weights where this process has all of them, and has a copy elsewhere: a module here, or
        a server's."""
        model = self._model
        if shares_weights(config.rollout.engine) and (model is None or config.policy.engine != "local"):
            model = self._copy = load_policy(config, self.device)[0]
            self._arriving = {name: each for name, each in model.named_parameters() if each.requires_grad}
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
        )
        self.roles["rollout"] = sampler
        where: dict[str, Any] = {"device": self.device, "timeout_s": self.part.timeout_s}
        if not shares_weights(config.rollout.engine):
            self.taker = ServerTaker(sampler, **where)
            self._server = server_of(sampler)
        elif self._copy is not None:
            self.taker = CopyTaker(sampler, self._arriving, **where)


def _describe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The files that servers read beside weights."""
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
