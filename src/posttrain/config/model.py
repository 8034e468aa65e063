"""The model that is trained, and how its numbers are stored and computed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from posttrain.config.base import Section
from posttrain.registry import plug_in

NOTHING = ("None", "none", "null", "NULL", "Null")


def names_a_model(value: str) -> str:
    """Reject the texts by which programs write that there is none: Hydra and YAML read None as a name."""
    if value in NOTHING:
        raise PydanticCustomError(
            "no_model",
            "the text '{text}' names nothing; write a folder or a hub id, or null where the key may be left out",
            {"text": value},
        )
    return value


ModelName = Annotated[str, AfterValidator(names_a_model)]


class ModelConfig(Section):
    path: ModelName
    """Folder or hub id of a Hugging Face causal language model, or of a vision-language model (docs/vision.md). An id may name a
    revision: org/name@REVISION."""
    revision: str | None = None
    """Branch, tag or commit of a hub id in model.path; null means the newest of main. The run keeps to the commit."""
    tokenizer_path: ModelName | None = None
    """Folder or hub id of the tokenizer; null means the model's."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of forward and backward passes; float16 scales the loss by a factor that adapts, and is slow on a CPU."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights that the optimizer works on, their gradients and its state. bfloat16 (with bfloat16 compute)
    takes half the memory and loses updates that are small beside their weight."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    activation_offload: bool = False
    """Keep activations in CPU memory between forward and backward pass; for accelerators."""
    padded: bool = False
    """Let the padding of micro-batches go through the model instead of packing sequences: the same numbers, slower."""
    compile: bool = False
    """torch.compile the MLPs and norms; takes a minute or more at the start. docs/training.md says where it pays."""
    liger: bool = False
    """Run MLPs, norms and rotary embeddings with Liger's kernels; needs a GPU and the package liger-kernel."""
    freeze_vision: bool = False
    """Leave a vision-language model's vision tower, and the layers that join it to the language model, as they are."""
    freeze: list[str] = []
    """Beginnings of names of weights that are not trained, such as model.embed_tokens or model.layers.0., as the model's
    checkpoint names them; each must match some."""
    fused_layers: bool = True
    """Compute norms, gated MLPs, position embeddings, scores and AdamW on a CPU by compiled kernels, or in fewer operations,
    where these are as near to float32; false: as transformers and torch do."""
    fast_float32: bool = True
    """Multiply float32 matrices with oneDNN on a CPU where that is faster and exact; false: with torch's default library."""
    trust_remote_code: bool = False
    """Allow code from the model's folder to run. Off unless you have read that code."""
    chat_template: str | None = None
    """Text of a Jinja template that replaces the tokenizer's chat template; null keeps it."""
    chat_template_file: str | None = None
    """Jinja file that replaces the tokenizer's chat template; null keeps it."""
    config_overrides: dict[str, Any] = {}
    """Fields of the model's config.json that are set to other values before the weights are loaded. Rotary positions are
    changed by rope_theta and rope_scaling, whatever the version of the file calls them."""
    config_path: str | None = None
    """Folder whose config.json describes the model instead of the one beside the weights, or that file; null: theirs."""
    external_modules: list[str] = []
    """Python modules that are imported before the model is loaded. They may register architectures, and estimators, losses,
    rewards and so on, whose names are read from their source when the configuration is."""

    @field_validator("external_modules")
    @classmethod
    def _plug_in(cls, value: list[str]) -> list[str]:
        """Make the names that they register known to the sections after this one. Nothing is imported."""
        plug_in(value)
        return value

    @field_validator("chat_template_file")
    @classmethod
    def _one_template(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("chat_template") is not None:
            raise PydanticCustomError("two_templates", "model.chat_template is a template, too; keep one of the two")
        return value


class ReferenceConfig(Section):
    path: ModelName | None = None
    """Frozen model that KL is measured against; null means the policy's starting weights."""
    sequences_per_micro_batch_per_device: int = Field(default=32, ge=1)
    """Sequences per forward pass when log-probs are computed without gradient (reference, and old log-probs of the policy)."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Cut those passes by this many tokens per device instead of by count; null cuts by count."""
    offload: bool = False
    """Keep its weights in CPU memory except while it scores a step; for accelerators."""
    update_every: Annotated[int, Field(ge=1)] | Literal["epoch"] | None = None
    """Mix the policy's weights into the reference after every so many steps, or after every epoch of the data (TR-DPO); null
    keeps it frozen."""
    update_mix: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the policy in the new reference; 1 replaces it."""
    engine_options: dict[str, Any] = {}
    """Options for the reference's engine, as policy.engine_options."""
    devices: list[int] | None = None
    """Devices of the reference, by number; null means all."""
