"""A language model that a run serves for reward functions of the user's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from posttrain.config.base import Section

REWARD_SERVER = "served judge"  # its role


class ServedModelConfig(Section):
    """A frozen language model behind an address, which functions of the reward terms ask. The run starts its servers, one for
    every copy, and ends them."""

    path: str
    """Folder or hub id of a Hugging Face causal language model."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """Server that the run starts, one for each copy."""
    engine_options: dict[str, Any] = {}
    """Options for the server in its own words; python names one that has it."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices that share a copy."""
    devices: list[int] | None = None
    """Devices of all copies, by number; null means all."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt and answer together, in tokens; null means the model's own limit."""
    max_concurrent_sequences: int = Field(default=256, ge=1)
    """Answers decoded side by side, in each copy."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Tokens of prompts read in one pass."""
    trust_remote_code: bool = False
    """Allow code from the model's folder to run."""
    address_as: str = "reward_router_address"
    """Parameter in which functions get the address, host:port; the default is verl's name."""
