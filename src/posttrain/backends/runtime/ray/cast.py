"""What lives in a worker: one rank of the roles that share its devices, or one copy of the sampler apart from them.

The driver calls the methods of ``Cast`` by name. Every rank of a group gets the same calls in the same order, so that what
they do together (gather weights, add up gradients) meets.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from posttrain.backends.runtime.ray.wire import from_plain, to_plain
from posttrain.backends.runtime.ray.worker import Failure, Groups, Outbox
from posttrain.backends.serving.start import SHARING, make_sampler
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
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import Request, RolloutEngine, Served
from posttrain.models.loading import DTYPES, import_modules, load_tokenizer
from posttrain.models.weight_transfer import (
    Manifest,
    TensorEntry,
    WeightsDiffer,
    check_names,
    check_tensor,
    dtype_of,
    entry_of,
    join_group,
    manifest_of,
    receive_buckets,
    send_buckets,
)
from posttrain.placement.roles import learner_of
from posttrain.records.batches import LossCounts
from posttrain.records.notices import Notices
from posttrain.records.plans import BatchPlan, LossPlan, SftBatchPlan, ValueLossPlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, Trajectory, TrajectoryGroup


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


def make_cast(outbox: Outbox, part: Part) -> Cast:
    """Load the models of this rank. Raises: RequestError for what is wrong with them; RunStopped."""
    return Cast(outbox, part)


class Cast:
    """See the module."""

    def __init__(self, outbox: Outbox, part: Part):
        config: TrainingConfig = part.kind.model_validate_json(part.config)
        self.config, self.outbox, self.part = config, outbox, part
        torch.set_num_threads(part.threads)
        disable_progress_bar()  # every line that is printed here goes to the driver
        self.device = torch.device("cuda" if part.cuda else "cpu")
        self._enter_folders()
        import_modules(config.model.external_modules)
        self.notices = Notices()
        self.tokenizer = load_tokenizer(config.model)
        self.roles: dict[str, Any] = {}
        self.sharding = Sharding()
        self._model: PreTrainedModel | None = None  # that is trained
        self._copy: PreTrainedModel | None = None  # that is sampled from, where it is another
        self._writers: dict[str, Callable[[Path], None]] = {}
        self._taken: dict[str, TensorEntry] = {}  # tensors of the version that is just arriving
        if part.meeting:
            self._meet(*part.meeting)
        if isinstance(config, RunConfig):
            assert isinstance(part.batches, BatchPlan)
            self._start_roles(config, part.batches)
        else:
            assert isinstance(part.batches, SftBatchPlan)
            self._start_learner(config, part.batches)

    # ---------------------------------------------------------------------------------------------- what the driver calls

    def notes(self) -> list[str]:
        """For people: how roles are computed, where it is not the usual way."""
        return [role.note for role in self.roles.values() if getattr(role, "note", None)]

    def model_call(self, role: str, method: str) -> Any:
        """A method of a model's engine that takes nothing."""
        return getattr(self.roles[role], method)()

    def score(self, batch: Any, role: str, method: str, *arguments: float) -> Any:
        """A method that gives [B, T] for a SequenceBatch; both as plain values."""
        return self._told(getattr(self.roles[role], method)(from_plain(batch), *arguments))

    def learn(self, batch: Any, role: str, loss: LossPlan | ValueLossPlan, counts: LossCounts) -> Any:
        """Forward and backward over a TrainBatch; the batch and the result as plain values."""
        return self._told(self.roles[role].forward_backward(from_plain(batch), loss, counts))

    def save(self, role: str, folder: Path, optimizer: bool) -> None:
        self.roles[role].save(folder, optimizer=optimizer)

    def gather(self, role: str, optimizer: bool) -> None:
        """The first part of saving; ``write`` is the second, beside other work."""
        self._writers[role] = self.roles[role].writer(optimizer=optimizer)

    def write(self, role: str, folder: Path) -> None:
        self._writers.pop(role)(folder)

    def load(self, role: str, folder: Path, optimizer: bool, schedule: bool) -> None:
        self.roles[role].load(folder, optimizer=optimizer, schedule=schedule)

    def version(self, role: str) -> int:
        found: int = self.roles[role].version
        return found

    def reward(self, groups: Sequence[TrajectoryGroup]) -> Any:
        return self.roles["reward model"].score(groups)

    def generate(self, call: int, prompts: Sequence[tuple[int, Prompt]], sampling: SamplingParams) -> Groups:
        """Sample. Groups go into the outbox as they are done; returned are those that nobody has fetched from there.

        Args: ``call`` is the driver's number of this call, and each prompt has its number in it.
        """
        numbers = {id(prompt): number for number, prompt in prompts}

        def done(group: TrajectoryGroup) -> None:
            self.outbox.add_group((call, numbers[id(group.prompt)]), group.trajectories)

        self.rollout.generate([prompt for _, prompt in prompts], sampling, self.outbox.add_tokens, done)
        return self.outbox.take_groups()

    def open_stream(self, sampling: SamplingParams) -> None:
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

    # ------------------------------------------------------------------------------------------- weights for the sampler

    def share_weights(self, version: int) -> tuple[Served, Served] | None:
        """Give the sampler of this very process the policy's weights: what was sent and what has arrived, by their hashes.

        None where the sampler reads the policy's own tensors.
        """
        if self._copy is not None:
            sent = []
            for name, tensor in self.weights():
                sent.append(entry_of(name, tensor))
                self._arriving[name].data.copy_(tensor)
            arrived = manifest_of(self._arriving.items(), version)
            served = Served(version, Manifest(version, tuple(sent)).content_hash), Served(version, arrived.content_hash)
        self.rollout.weights_changed(version)
        return None if self._copy is None else served

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, whole, in the precision to compute in, by name. All ranks must go through it together."""
        assert self._model is not None
        dtype = DTYPES[self.config.model.compute_dtype]
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, self.sharding.whole(parameter).to(dtype)

    def begin_sending(self, bucket_bytes: int) -> int:
        """How many buckets ``next_bucket`` will give."""
        assert self._model is not None
        self._sent: list[TensorEntry] = []
        self._buckets = _in_buckets(self.weights(), bucket_bytes)
        itemsize = DTYPES[self.config.model.compute_dtype].itemsize
        sizes = [each.numel() * itemsize for each in self._model.parameters() if each.requires_grad]
        return sum(1 for _ in _cut(sizes, bucket_bytes))

    def next_bucket(self) -> tuple[tuple[TensorEntry, ...], Any]:
        """The next tensors, and their bytes one after another as an array."""
        entries, flat = next(self._buckets)
        self._sent += entries
        return entries, flat.numpy()

    def finish_sending(self, version: int) -> Served:
        """What has been sent."""
        return Served(version, Manifest(version, tuple(self._sent)).content_hash)

    def list_weights(self, version: int) -> str:
        """Their manifest as JSON."""
        return manifest_of(self.weights(), version).to_json()

    def announce(self, manifest: str) -> Served:
        """What a manifest stands for."""
        listed = Manifest.from_json(manifest)
        return Served(listed.version, listed.content_hash)

    def take_bucket(self, bucket: tuple[tuple[TensorEntry, ...], Any] | Failure) -> Failure | None:
        """Raises: RunStopped when a tensor is not what was sent. A sender's failure is handed on."""
        if isinstance(bucket, Failure):
            return bucket
        entries, data = bucket
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # shared memory cannot be written to, and is not
            flat = torch.from_numpy(data)
        start = 0
        for entry in entries:
            part = flat[start : start + entry.nbytes]
            start += entry.nbytes
            dtype = dtype_of(entry.dtype)
            aligned = part if part.data_ptr() % dtype.itemsize == 0 else part.clone()
            self._take(entry, aligned.view(dtype).view(entry.shape))
        return None

    def finish_taking(self, version: int) -> Served:
        """Everything has come: what is served from now on."""
        served = Served(version, Manifest(version, tuple(self._taken.values())).content_hash)
        try:
            check_names(self._arriving, self._taken)
        except WeightsDiffer as error:
            raise RunStopped(f"weights on their way to the sampler: {error}") from error
        self._taken = {}
        self.rollout.weights_changed(version)
        return served

    def broadcast(self, manifest: str, meeting: tuple[str, int], size: int, bucket_bytes: int) -> None:
        """Send the weights of a manifest to every sampler, which call ``receive``."""
        listed = Manifest.from_json(manifest)
        if self.part.rank > 0:
            for _ in self.weights():  # rank 0 sends what all gather
                pass
            return
        group = join_group(self._backend(), *meeting, 0, size, self.part.timeout_s)
        send_buckets(group, ((n, t.to(self.device)) for n, t in self.weights()), listed, bucket_bytes)

    def receive(self, manifest: str, meeting: tuple[str, int], rank: int, size: int, bucket_bytes: int) -> None:
        """Raises: RunStopped when a tensor is not what the manifest lists."""
        listed = Manifest.from_json(manifest)
        group = join_group(self._backend(), *meeting, rank, size, self.part.timeout_s)
        entries = {entry.name: entry for entry in listed.tensors}
        try:
            for name, tensor in receive_buckets(group, listed, bucket_bytes, self.device):
                self._take(entries[name], tensor)
        except WeightsDiffer as error:
            raise RunStopped(f"weights on their way to the sampler: {error}") from error

    # ------------------------------------------------------------------------------------------------------------ inside

    def _told(self, result: Any) -> Any:
        """A result as a plain value, and what there is to tell people."""
        if self.part.rank == 0:
            self.outbox.add_notices(self.notices.take())
        return to_plain(result)

    @property
    def rollout(self) -> RolloutEngine:
        engine: RolloutEngine = self.roles["rollout"]
        return engine

    def _take(self, entry: TensorEntry, tensor: Tensor) -> None:
        try:
            check_tensor(entry, tensor)
            parameter = self._arriving[entry.name]
        except (WeightsDiffer, KeyError) as error:
            raise RunStopped(f"weights on their way to the sampler: {error}") from error
        parameter.data.copy_(tensor)
        self._taken[entry.name] = entry

    def _enter_folders(self) -> None:
        """Raises: RunStopped when this node lacks one: checkpoints are read and written by workers."""
        missing = [folder for folder in self.part.folders if not Path(folder).is_dir()]
        if missing:
            raise RunStopped(
                f"{self.part.node} does not see {' and '.join(missing)}; start the run in a folder, and with a run.folder, on "
                "a file system that all nodes of the run share"
            )
        os.chdir(self.part.folders[1])

    def _backend(self) -> str:
        return "nccl" if self.part.cuda else "gloo"

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
        if learner_of(self.config, role).engine != "fsdp":
            return None
        from posttrain.backends.train.fsdp.sharding import sharding_of

        return sharding_of(self.config, role, self.device.type, DTYPES[self.config.model.compute_dtype])

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
        self._model, _ = load_policy(self.config, self.device, dtype=masters if sharding else None)
        self.sharding = sharding or self.sharding
        return self._model, sharding

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
        """The sampler reads the policy's weights where this process has all of them, and has a copy elsewhere."""
        model = self._model
        if model is None or config.policy.engine != "local":
            model = self._copy = load_policy(config, self.device)[0]
            self._arriving = {name: each for name, each in model.named_parameters() if each.requires_grad}
            model.requires_grad_(False)
        assert config.rollout.engine in SHARING
        self.roles["rollout"] = make_sampler(
            config.rollout,
            config.model,
            lambda: model,
            self.tokenizer,
            device=self.device,
            seed=config.run.seed,
            max_prompt_tokens=config.context_tokens,
        )


def _in_buckets(
    weights: Iterator[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[tuple[tuple[TensorEntry, ...], Tensor]]:
    """Tensors one after another in flat buckets."""
    entries: list[TensorEntry] = []
    parts: list[Tensor] = []
    for name, tensor in weights:
        entry = entry_of(name, tensor)
        if entries and sum(each.nbytes for each in entries) + entry.nbytes > bucket_bytes:
            yield tuple(entries), torch.cat(parts)
            entries, parts = [], []
        entries.append(entry)
        parts.append(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
    if entries:
        yield tuple(entries), torch.cat(parts)


def _cut(sizes: Sequence[int], bucket_bytes: int) -> Iterator[int]:
    """The bytes of each bucket: at most so many, but a larger tensor has a bucket of its own."""
    held = 0
    for size in sizes:
        if held and held + size > bucket_bytes:
            yield held
            held = 0
        held += size
    if held:
        yield held
