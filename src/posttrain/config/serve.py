"""ServeConfig: a model behind an OpenAI-compatible address, every request recorded token by token."""

from __future__ import annotations

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


class EndpointConfig(Section):
    host: str = "127.0.0.1"
    """Address to listen at. Others than this machine's own can be reached from outside, and what is said is not encrypted."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen at; 0 takes a free one, which is printed."""
    host_names: list[str] = []
    """Further names by which clients may address this machine, such as that of a proxy; requests for others are refused."""
    token_file: str | None = None
    """File with the bearer token that clients must send; null draws one and prints it."""
    name: str | None = None
    """Name of the model, as clients see it; null means that of its folder."""
    record: str | None = None
    """JSONL file that gets a line for every response: token ids, log-probs, messages; null writes none."""
    any_sampling: bool = False
    """Answer requests that ask for another temperature or top_p than rollout's, with rollout's; false refuses them."""
    session_header: str = "X-Session-Id"
    """Header that names the conversation a request belongs to: its earlier turns are continued token by token."""
    max_sessions: int = Field(default=1024, ge=1)
    """Conversations that are remembered; the one that was silent longest is forgotten first."""


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
    placement: PlacementConfig = PlacementConfig()
    """Devices."""
