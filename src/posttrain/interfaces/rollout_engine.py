"""Interface of samplers (rollout engines)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from posttrain.records.images import PromptImages
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, Trajectory, TrajectoryGroup, Unfinished, in_memory

OnTokens = Callable[[int], None]  # called at intervals with the number of tokens sampled since the last call
OnGroup = Callable[[TrajectoryGroup], None]  # called with each group once all its responses have ended


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one response."""

    sample_id: str  # with the seed it determines every draw, so each turn of a conversation needs its own
    token_ids: tuple[int, ...]  # the prompt: all tokens before the response
    max_response_tokens: int
    conversation: str = ""  # requests of one conversation extend each other's tokens; "": independent
    images: PromptImages | None = None  # whose tokens are among token_ids
    seed: int | None = None  # of its draws; None: the stream's
    draws_as: str = ""  # the name that its draws depend on; "": sample_id
    sampling: SamplingParams | None = None  # its distribution and stops, for engines that take them; None: the stream's
    top_logprobs: int = 0  # likeliest tokens to report at every place of the response, by engines that can
    prompt_logprobs: bool = False  # report the log-probs of its prompt's tokens, and its likeliest ones, too
    grammar: str = ""  # that its text is kept within, by engines that can (libraries.grammars); "": none
    begun: Unfinished | None = None  # tokens sampled before, which the response continues

    @classmethod
    def of(cls, prompt: Prompt, number: int, max_response_tokens: int) -> Request:
        """Return the request for a prompt's sample of a number, from 0."""
        return cls(f"{prompt.prompt_id}/{number}", prompt.token_ids, max_response_tokens, images=prompt.images)

    @property
    def draw_name(self) -> str:
        return self.draws_as or self.sample_id

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """The prompt, and the tokens that the response has already."""
        return self.token_ids if self.begun is None else (*self.token_ids, *self.begun.token_ids)

    @property
    def length(self) -> int:
        """The number of all tokens."""
        return len(self.token_ids) + (0 if self.begun is None else len(self.begun.token_ids))


def as_read(request: Request) -> Request:
    """The request with the tokens that it has in memory: those of another worker lie in a store (records.stored_rows)."""
    return request if request.begun is None else replace(request, begun=in_memory(request.begun))


def check_requests(requests: Sequence[Request], under_way: Collection[str]) -> None:
    """Raises: ValueError when the requests cannot be submitted besides those ``under_way`` (sample ids)."""
    known = under_way if isinstance(under_way, AbstractSet | Mapping) else frozenset(under_way)
    names: set[str] = set()
    for request in requests:
        if request.sample_id in known or request.sample_id in names:
            raise ValueError(f"{request.sample_id} is already in progress")
        if not request.token_ids or request.max_response_tokens < 1:
            raise ValueError(f"{request.sample_id}: the prompt and the response need at least one token each")
        if request.begun is not None and request.prompt_logprobs:
            raise ValueError(f"{request.sample_id}: a continued response reports no log-probs of its prompt")
        if request.begun is not None and request.top_logprobs and not request.begun.has_top_logprobs:
            raise ValueError(
                f"{request.sample_id}: the likeliest tokens at the places that it has already are not known"
            )
        names.add(request.sample_id)


class RequestStream(Protocol):
    """A stream of requests, submitted while others are being sampled, for multi-turn episodes. For one thread at a time.

    A failed response is a trajectory with the stop reason ``failed``, as in ``generate``. A response depends on its request,
    the seed and the weights, but not on when it was submitted or what shared its batch, except for the rounding of sums.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests and return at once. Where the engine can, they join the batch within a few tokens.

        Raises: ValueError as ``check_requests``, in which case no request is accepted; RuntimeError when closed.
        """
        ...

    def wait(self, timeout_s: float) -> list[Trajectory]:
        """Sample until a response has ended, no request is in flight, or the time is over. Every response is returned once, in
        no particular order. Engines that sample within this call overrun the time by up to one of their steps (a token; ``hf``:
        a whole batch), and always make at least one.

        Raises: RunStopped as ``generate`` does, but failed responses are always returned, however many there are.
        """
        ...

    def cancel(self, sample_ids: Collection[str]) -> None:
        """Drop requests: their responses are not returned. Unknown ids are ignored."""
        ...

    def close(self) -> None:
        """Drop the requests in flight, and free the memory of sampling. Closing twice is allowed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None:
        """Close the stream."""
        ...


@runtime_checkable
class ResumableStream(RequestStream, Protocol):
    """A stream that hands back unfinished responses and continues them (registered with ``resumes_responses=True``).

    A continued response reads its prompt and the tokens it has, recomputed with the current weights, or with ``keep_cache`` as
    older weights computed them, and draws the next token with the random number of its place: where it was taken back makes no
    difference but for the weights.
    """

    @property
    def slots(self) -> int:
        """Responses sampled at a time; further requests wait for one to end."""
        ...

    @property
    def passes(self) -> int:
        """Passes of the model since the stream was opened. What happens in them depends on the requests, the weights and the
        passes between which requests came and went, and not on seconds."""
        ...

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        """See RequestStream; at most so many passes."""
        ...

    def progress(self, since: Mapping[str, int]) -> list[Unfinished]:
        """Return the unfinished responses that have more tokens than ``since`` says, each with the tokens beyond and all of its
        spans. Sampling goes on."""
        ...

    def take_back(self, *, keep_cache: bool = False) -> list[Unfinished]:
        """Drop all requests and return their progress, in the order of submission. A request whose ``begun`` is the result
        continues it, in this stream or another. ``keep_cache`` is for engines registered with ``keeps_cache=True``."""
        ...


class TurnSampler(Protocol):
    """The part of a sampler that episodes need."""

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> RequestStream:
        """Open a stream of requests with these settings (``samples_per_prompt`` and ``max_response_tokens`` come with a request).

        Raises: RuntimeError while another one is open. While this one is open, ``generate`` raises RuntimeError, and so does
            ``weights_changed`` when requests are in flight.
        """
        ...


class RolloutEngine(TurnSampler, Protocol):
    @property
    def version(self) -> int:
        """Version of the sampler's weights: the number of updates made to them."""
        ...

    @property
    def note(self) -> str:
        """Message for the user when sampling is computed in an unusual way; "" otherwise."""
        ...

    def weights_changed(self, version: int) -> None:
        """Declare that the weights it reads are now this version; it drops caches computed with older ones."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        """Sample one group per prompt, in the given order. ``on_group`` is called with each group as soon as it is complete,
        while others are still being sampled where the engine can."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """The version and content hash of the weights that a sampler reports to serve."""

    version: int
    content_hash: str
    nbytes: int = field(default=0, compare=False)  # sent to each copy, counted by the sender

    def __str__(self) -> str:
        return f"weights of version {self.version} ({self.content_hash[:12] or 'no hash'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastPlan:
    """The process group in which the trainer, rank 0, broadcasts weights to a sampler's workers."""

    backend: str  # gloo or nccl
    address: str
    port: int
    size: int  # the trainer and all workers
    first_rank: int = 1  # rank of this sampler's first worker, when several samplers take part
    bucket_bytes: int
    timeout_s: float


class WeightTaker(RolloutEngine, Protocol):
    """A sampler with its own copy of the weights, updated by the trainer."""

    def load_folder(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        """Load the weights of a folder (models.weight_transfer). Returns: by name, the weights that every copy reports to serve.

        Raises: RunStopped when a copy fails, or finds other tensors than the folder's manifest lists.
        """
        ...

    def load_adapter(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        """Load a LoRA adapter, in peft's format with a manifest, over the base weights loaded at the start.

        Raises: RunStopped as ``load_folder``, and when the sampler does not support adapters.
        """
        ...

    def receive(self, manifest: str, announced: Served, group: BroadcastPlan) -> list[tuple[str, Served]]:
        """Load weights from a broadcast: the workers join the group and receive what the manifest lists."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpan:
    """The place of one machine among those that share a copy of a server's weights."""

    nodes: int
    rank: int  # 0: the machine that answers requests
    address: str  # of that machine
    port: int  # of that machine, at which the processes meet
    host: str  # this machine's own address


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerPlan:
    """Settings to start a sampler with its own copy of the weights, in plain values."""

    model_path: str
    tokenizer_path: str
    trust_remote_code: bool = False
    # Overrides of the model's config.json.
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"  # bfloat16, float32: the trainer's compute dtype
    cuda: bool = False
    seed: int = 0
    end_tokens: frozenset[int]
    max_model_len: int | None = None  # longest prompt and response together, tokens; None: the model's own
    max_concurrent_sequences: int = 256
    max_prefill_tokens: int = 8192
    tensor_parallel: int = 1
    endpoints: tuple[str, ...] = ()  # addresses of running servers
    timeout_s: float = 600.0
    retries: int = 3
    adapter_rank: int = 0  # of the LoRA adapters to be loaded; 0: whole weights are loaded
    host: str = "127.0.0.1"  # address that a server listens at
    span: NodeSpan | None = None  # None: all of a copy is on this machine
    note: str = ""  # see RolloutEngine.note
    options: Mapping[str, Any] = field(default_factory=dict)  # rollout.engine_options
    # data.image_options, of the image processor
    image_options: Mapping[str, Any] = field(default_factory=dict)
    # Which of the model's layers have experts, where the sampler reports those of every token; empty: it does not
    expert_layers: tuple[bool, ...] = ()
