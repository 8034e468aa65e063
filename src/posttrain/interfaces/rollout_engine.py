"""A sampler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from posttrain.records.images import PromptImages
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, Trajectory, TrajectoryGroup

OnTokens = Callable[[int], None]  # called now and then with the number of tokens sampled since the last call
OnGroup = Callable[[TrajectoryGroup], None]  # called with each group when all its responses have ended


@dataclass(frozen=True, slots=True)
class Request:
    """One response that is asked for."""

    sample_id: str  # with the seed it fixes every draw: each turn of a conversation needs an id of its own
    token_ids: tuple[int, ...]  # all that comes before the response
    max_response_tokens: int
    conversation: str = ""  # the next request of the same one begins with what this one comes to; "": it stands alone
    images: PromptImages | None = None  # whose tokens are among token_ids


def check_requests(requests: Sequence[Request], under_way: Collection[str]) -> None:
    """Raises: ValueError when these cannot be submitted beside those that are under way, by their ids."""
    names = set(under_way)
    for request in requests:
        if request.sample_id in names:
            raise ValueError(f"{request.sample_id} is under way already")
        if not request.token_ids or request.max_response_tokens < 1:
            raise ValueError(f"{request.sample_id}: a prompt and a response have a token at least")
        names.add(request.sample_id)


class RequestStream(Protocol):
    """Requests that come while others are being sampled, as turns of conversations do. For one thread at a time.

    A response that cannot be had is a trajectory with the stop reason ``failed``, as in ``generate``. A response depends on its
    request, the seed and the weights, and not on when it was asked for or what shared its batch, but for the rounding of sums.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Returns at once. Where the engine can, they join what is being sampled within a few tokens.

        Raises: ValueError as ``check_requests``, and then none of them is taken; RuntimeError when closed.
        """
        ...

    def wait(self, timeout_s: float) -> list[Trajectory]:
        """Go on sampling until at least one response has ended, nothing is under way, or the time is over. Every response is
        handed out once, in no particular order. Engines that sample within this call overrun the time by up to one of their
        steps (a token; ``hf``: a whole batch), and always make at least one.

        Raises: RunStopped as ``generate`` does, except that failures are handed out however many there are.
        """
        ...

    def cancel(self, sample_ids: Collection[str]) -> None:
        """Give up requests: nothing of them is handed out any more. Ids that are not under way are passed over."""
        ...

    def close(self) -> None:
        """Give up what is under way, and the memory that sampling takes. Closing again does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None:
        """``close``"""
        ...


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

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> RequestStream:
        """A stream of requests sampled in this way (``samples_per_prompt`` and ``max_response_tokens`` are each request's own).

        Raises: RuntimeError while another one is open. While this one is, ``generate`` raises it, too, and so does
            ``weights_changed`` when responses are under way.
        """
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """Which weights a sampler says that it serves."""

    version: int
    content_hash: str
    nbytes: int = field(default=0, compare=False)  # that each copy was sent, by the sender's count

    def __str__(self) -> str:
        return f"weights of version {self.version} ({self.content_hash[:12] or 'no hash'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastPlan:
    """Where a sampler's workers meet the trainer, which is rank 0, to be sent weights."""

    backend: str  # gloo or nccl
    address: str
    port: int
    size: int  # the trainer and all workers
    first_rank: int = 1  # of this sampler's workers, where several samplers take part
    bucket_bytes: int
    timeout_s: float


class WeightTaker(RolloutEngine, Protocol):
    """A sampler with a copy of the weights, which has to be sent new ones."""

    def load_folder(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        """Take the weights of a folder (models.weight_transfer). Returns what every copy serves afterwards, by its own account.

        Raises: RunStopped when a copy cannot, or finds other tensors than the folder's manifest lists.
        """
        ...

    def load_adapter(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        """Take a LoRA adapter, in peft's format with a manifest beside it, over the base weights that were loaded at the start.

        Raises: RunStopped as ``load_folder``, and when it cannot have adapters.
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
    adapter_rank: int = 0  # of the LoRA adapters that it will be sent; 0: it is sent whole weights
    note: str = ""  # for people: see RolloutEngine.note
    options: Mapping[str, Any] = field(default_factory=dict)  # rollout.engine_options
