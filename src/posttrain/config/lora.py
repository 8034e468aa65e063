"""Low-rank adapters: what is trained in the place of all weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section


class LoraConfig(Section):
    """Every chosen layer W becomes W + scale x B A, of which only A and B are trained (arXiv:2106.09685)."""

    rank: int = Field(default=16, ge=1, le=65_536)
    """Rows of A, columns of B."""
    alpha: float = Field(default=16.0, gt=0.0)
    """The scale is alpha / rank, or alpha / sqrt(rank) with use_rslora."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the adapter's inputs that are dropped in updates; nothing is dropped when sampling or scoring."""
    target_modules: list[str] | str = "all-linear"
    """Layers that get an adapter: all-linear (all but the output layer), names such as [q_proj, v_proj], or a regular
    expression that matches whole dotted names. A vision tower gets none."""
    exclude_modules: list[str] | str | None = None
    """Layers that get none after all, as names or a regular expression."""
    use_rslora: bool = False
    """Divide alpha by the root of the rank, which keeps large ranks learning (arXiv:2312.03732)."""
    quantize: Literal["nf4", "fp4"] | None = None
    """Store the linear layers below the adapter in 4 bits (QLoRA, arXiv:2305.14314): nf4 or fp4, of bitsandbytes; null keeps
    them in the compute dtype. Needs the engine local. Reference, sampler and exports have the rounded weights."""
    quantize_scales: bool = True
    """Store the scales of the 4-bit weights in 8 bits: 0.13 instead of 0.5 bits per weight."""
    adapter_path: str | None = None
    """Folder of a saved adapter (peft's format) to start from; its own rank, alpha and layers count. The reference, where it
    is the policy's starting model, is the model without the adapter."""
