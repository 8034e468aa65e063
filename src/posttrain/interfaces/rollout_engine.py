"""A sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, TrajectoryGroup

OnTokens = Callable[[int], None]  # called now and then with the number of tokens sampled since the last call
OnGroup = Callable[[TrajectoryGroup], None]  # called with each group when all its responses have ended


class RolloutEngine(Protocol):
    @property
    def version(self) -> int:
        """Version of the weights it samples from: the number of updates they have seen."""
        ...

    @property
    def note(self) -> str:
        """For people: how it computes, where that is not the usual way; "" otherwise."""
        ...

    def weights_changed(self, version: int) -> None:
        """The weights it reads now are this version; whatever it kept of older ones is void."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        """One group per prompt, in the order given. ``on_group`` gets the same groups, in the order in which they are done,
        while others are still being sampled where the engine can."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """Which weights a sampler says that it serves."""

    version: int
    content_hash: str

    def __str__(self) -> str:
        return f"weights of version {self.version} ({self.content_hash[:12] or 'no hash'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastPlan:
    """Where a sampler's workers meet the trainer, which is rank 0, to be sent weights."""

    backend: str  # gloo or nccl
    address: str
    port: int
    size: int  # the trainer and all workers
    bucket_bytes: int
    timeout_s: float


class WeightTaker(RolloutEngine, Protocol):
    """A sampler with a copy of the weights, which has to be sent new ones."""

    def load_folder(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        """Take the weights of a folder (models.weight_transfer). Returns what every copy serves afterwards, by its own account.

        Raises: RunStopped when a copy cannot, or finds other tensors than the folder's manifest lists.
        """
        ...

    def receive(self, manifest: str, announced: Served, group: BroadcastPlan) -> list[tuple[str, Served]]:
        """The same, from a broadcast: the workers join the group and receive what the manifest lists."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerPlan:
    """What a sampler with a copy of the weights is started with, in plain values."""

    model_path: str
    tokenizer_path: str
    trust_remote_code: bool = False
    config_overrides: Mapping[str, Any] = field(default_factory=dict)  # over the model's config.json
    dtype: str = "auto"  # bfloat16, float32: the trainer's compute dtype
    cuda: bool = False
    seed: int = 0
    end_tokens: frozenset[int]
    max_model_len: int | None = None  # longest prompt and response together, tokens; None: the model's own
    max_concurrent_sequences: int = 256
    max_prefill_tokens: int = 8192
    tensor_parallel: int = 1
    endpoints: tuple[str, ...] = ()  # of servers that run already
    timeout_s: float = 600.0
    retries: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)  # rollout.engine_options
