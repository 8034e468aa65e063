"""The base, and the records, of verl's agent loops: classes whose coroutine plays an episode token by token.

Versions of verl differ in what they hand to the constructor: a class gets what its signature names (``made``), and the base here
has the attributes of all of them.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class AgentLoopMetrics(BaseModel):
    """Seconds of a loop by what they were spent on."""

    model_config = ConfigDict(extra="allow")

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class AgentLoopOutput(BaseModel):
    """An episode: a prompt, what follows it, and which of that the model wrote (1)."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = AgentLoopMetrics()
    extra_fields: dict[str, Any] = {}


class TokenOutput(list[int]):
    """A response: the list of its tokens, as verl 0.5 gives it, with the attributes of later versions."""

    def __init__(self, token_ids: Sequence[int] = (), log_probs: Sequence[float] | None = None, stop_reason: str = ""):
        super().__init__(token_ids)
        self.log_probs = None if log_probs is None else list(log_probs)
        self.stop_reason = stop_reason or None
        self.routed_experts = None
        self.num_preempted = 0
        self.extra_fields: dict[str, Any] = {}

    @property
    def token_ids(self) -> list[int]:
        return list(self)


@dataclass(frozen=True)
class MergeResult:
    """A context with something behind it (verl 0.9)."""

    token_ids: list[int]
    appended_token_count: int
    kind: str = "non_assistant"
    inserted_token_ids: list[int] = field(default_factory=list)
    removed_prefix_token_count: int = 0


class DictConfigWrap:
    """A configuration as constructors get it."""

    def __init__(self, config: Any):
        self.config = config


class ToolListWrap:
    """Tools as constructors get them."""

    def __init__(self, tools: Sequence[Any] = ()):
        self.tools = list(tools)


class AsyncLLMServerManager:
    """The base of what a loop calls for responses; the environment gives one of its own."""

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **more: Any
    ) -> TokenOutput:
        raise RuntimeError("responses come from the server_manager that a loop's constructor is given")


class AgentLoopWorkerBase:
    """A base of classes that stand beside loops in a file: verl's own workers, and their manager, are not needed here."""

    def __init__(self, *_: Any, **__: Any):
        raise RuntimeError(f"{type(self).__name__} drives verl's own servers, and none is made in a run of posttrain")


class AgentLoopWorker(AgentLoopWorkerBase):
    """The same by another name of verl's."""


class AgentLoopManager(AgentLoopWorkerBase):
    """The same for managers."""


_LOOPS: dict[str, dict[str, str]] = {}


def register(agent_name: str) -> Callable[[type], type]:
    """Return a decorator that leaves the class as it is: a run names its loops in agent_loop_config_path."""

    def registered(kind: type) -> type:
        _LOOPS[agent_name] = {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
        return kind

    return registered


class AgentLoopBase:
    """The base of agent loops. A subclass has the coroutine ``run(sampling_params, **columns of the row)``."""

    _class_initialized = False
    # Read by the loops of verl 0.9
    enable_continuous_token = False

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        dataset_config: Any = None,
        data_config: Any = None,
        **more: Any,
    ):
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls = dataset_cls
        data = dataset_config if dataset_config is not None else getattr(data_config, "config", None)
        self.dataset_config = self.data_config = data if data is not None else self.config.data
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs") or {}
        self.loop = asyncio.get_running_loop()
        given = {"config": self.config, "tokenizer": tokenizer, "processor": processor, **more}
        type(self).init_class(**named_in(type(self).init_class, given))

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **more: Any) -> None:
        """Prepare what all loops of the class share; subclasses of older versions do it here, once."""
        cls._class_initialized = True

    @cached_property
    def system_prompt(self) -> list[int]:
        """The tokens that the chat template writes before a conversation without a system message."""
        return initialize_system_prompt(self.tokenizer, **self.apply_chat_template_kwargs)

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the pictures of a conversation: none, since these loops read texts."""
        return {}

    process_multi_modal_info = process_vision_info

    def _get_mm_processor_kwargs(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal:
            raise ValueError("pictures, videos and sounds are not read by agent loops here")

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        **more: Any,
    ) -> list[int]:
        """Render a conversation up to the assistant's turn. Returns: its tokens, without the system prompt where asked."""
        if images or videos:
            raise ValueError("pictures and videos are not read by agent loops here")
        options = {**self.apply_chat_template_kwargs, **({"tools": list(tools)} if tools else {})}
        ids = list(
            self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False, **options)
        )
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def ct_build_initial_tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        """Render the first context (verl 0.9)."""
        if any(media.values()):
            raise ValueError("pictures, videos and sounds are not read by agent loops here")
        return await self.apply_chat_template(messages, tools)

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: Sequence[int],
        assistant_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Put a response behind its context (verl 0.9). Returns: both, the mask and the log-probs behind the first context."""
        count = len(assistant_token_ids)
        merged = MergeResult([*runtime_token_ids, *assistant_token_ids], count, "assistant")
        logprobs = None if response_logprobs is None else [*response_logprobs, *(assistant_logprobs or [0.0] * count)]
        return merged, [*response_mask, *[1] * count], logprobs

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: Sequence[Mapping[str, Any]],
        updated_messages: Sequence[Mapping[str, Any]],
        runtime_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Put the messages that follow a response behind it (verl 0.9), as the chat template writes them. Returns: as
        ``ct_merge_assistant_token``."""
        lost, added = self.server_manager.following(previous_messages, updated_messages, runtime_token_ids, tools or ())
        kept = len(runtime_token_ids) - lost
        merged = MergeResult([*runtime_token_ids[:kept], *added], len(added), removed_prefix_token_count=lost)
        behind = max(len(response_mask) - lost, 0)
        logprobs = None if response_logprobs is None else [*response_logprobs[:behind], *[0.0] * len(added)]
        return merged, [*response_mask[:behind], *[0] * len(added)], logprobs

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        raise TypeError(f"{type(self).__name__} has no coroutine run")


def initialize_system_prompt(tokenizer: Any, **options: Any) -> list[int]:
    """Return the tokens that a chat template writes before the first message by itself: what two conversations of one and of two
    empty messages have in common besides these."""
    empty = [{"role": "user", "content": ""}]
    one, two = (
        list(tokenizer.apply_chat_template(empty * count, add_generation_prompt=False, return_dict=False, **options))
        for count in (1, 2)
    )
    return one[: max(2 * len(one) - len(two), 0)]


def named_in(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the named values that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float], *_: Any, **__: Any) -> Iterator[None]:
    """Add the seconds of a block to a dictionary of timings."""
    begun = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - begun


@contextmanager
def rollout_trace_attr(*_: Any, **__: Any) -> Iterator[None]:
    """Do nothing: ``tracking`` traces."""
    yield


def resolve_config_path(config_path: str) -> str:
    """Return the absolute path of a file, relative to the current folder. Raises: FileNotFoundError."""
    found = Path(config_path).expanduser().resolve()
    if not found.is_file():
        raise FileNotFoundError(f"there is no file {config_path}")
    return str(found)
