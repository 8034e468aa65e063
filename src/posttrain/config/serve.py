"""ServeConfig: a model behind an address, which OpenAI's clients sample from or Tinker's train adapters over."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section
from posttrain.config.generate import GenerateRunSection
from posttrain.config.model import ModelConfig
from posttrain.config.placement import PlacementConfig
from posttrain.config.rollout import RolloutConfig


class ServeDataConfig(Section):
    max_prompt_tokens: int = Field(default=4096, ge=1)
    """Longest prompt, in tokens, after the chat template; longer ones are refused."""
    chat_template_options: dict[str, str | int | float | bool | None] = {}
    """Extra variables for the chat template, such as enable_thinking."""
    tool_call_form: str = "auto"
    """Form of the model's tool calls: hermes, qwen3_coder, glm, kimi, kimi_k3, minimax, deepseek, gemma, gpt_oss, seed; auto
    takes the one that the chat template writes."""


class EndpointConfig(Section):
    api: Literal["openai", "tinker"] = "openai"
    """Interface of the server: openai samples, tinker also trains adapters."""
    host: str = "127.0.0.1"
    """Address to listen at. Others than this machine's own can be reached from outside, and what is said is not encrypted."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen at; 0 takes a free one, which is printed."""
    host_names: list[str] = []
    """Further names by which clients may address this machine, such as that of a proxy; requests for others are refused."""
    token_file: str | None = None
    """File with the bearer token that clients must send; null draws one and prints it."""
    beside: str | None = None
    """Folder or hub id of a second model, such as the one before training, which has the same API under /beside/v1 and answers
    beside the first on the chat page; the other settings of model hold for both, and its responses are not recorded."""
    name: str | None = None
    """Name of the model, as clients see it; null means that of its folder."""
    record: str | None = None
    """JSONL file that gets a line for every response: token ids, log-probs, messages; null writes none."""
    any_sampling: bool = False
    """Answer all requests with rollout's sampling, whatever temperature, top_p, top_k and stop they ask for. With false the
    native engine samples as each request asks, and with other engines requests that differ are refused."""
    session_header: str = "X-Session-Id"
    """Header that names the conversation a request belongs to: its earlier turns are continued token by token."""
    max_sessions: int = Field(default=1024, ge=1)
    """Conversations that are remembered; the one that was silent longest is forgotten first."""


class TinkerConfig(Section):
    """A server with Tinker's API (endpoint.api tinker), whose clients train low-rank adapters over the model."""

    folder: str = "tinker"
    """Folder of what clients save; a server that is started again with it finds their states."""
    lora_alpha: float = Field(default=32.0, gt=0.0)
    """An adapter of rank r adds lora_alpha / r times B A to a layer, as Tinker's do."""
    max_rank: int = Field(default=256, ge=1)
    """Largest rank that a client may ask for."""
    max_adapters: int = Field(default=16, ge=1)
    """Adapters in training at a time, of all clients."""
    max_tokens_per_micro_batch: int = Field(default=8192, ge=1)
    """Tokens that one forward and backward pass holds; a longer sequence has a pass of its own."""
    session_timeout_s: float = Field(default=600.0, gt=0.0)
    """Seconds of silence after which a client's session ends and its adapters leave the memory."""


class ServeConfig(Section):
    """One endpoint."""

    model: ModelConfig
    """The model that is served."""
    data: ServeDataConfig = ServeDataConfig()
    """Prompts."""
    run: GenerateRunSection = GenerateRunSection()
    """Seed."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of the responses; max_response_tokens is the largest value that a request may set."""
    endpoint: EndpointConfig = EndpointConfig()
    """Address, token, record."""
    tinker: TinkerConfig = TinkerConfig()
    """Adapters that clients train, with endpoint.api tinker."""
    placement: PlacementConfig = PlacementConfig()
    """Devices."""
