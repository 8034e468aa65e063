"""What a run needs of each device's memory, estimated from the models' config.json and the sizes of a step. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config import RunConfig
from posttrain.placement.roles import RolePlacement
from posttrain.records.plans import BatchPlan

BYTES = {"float32": 4, "bfloat16": 2}
ADAM = 3  # values per trained weight: the gradient and Adam's two averages, in the dtype of the masters
# Weights of an adapter on all linear layers, per layer, hidden unit and rank: in + out of four attention matrices (7) and of
# an MLP four times as wide (15).
ADAPTER = 22
# Activations that the backward pass of one layer needs, in values per token and hidden unit: the inputs of attention,
# projections and products of the MLP (arXiv:2205.05198, section 4.1, without dropout and without the attention matrix).
ACTIVATIONS = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides its size."""

    parameters: int
    layers: int
    hidden: int
    key_value_width: int  # key/value heads x their size


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """Bytes on each device of a role. Estimates: good to tell 10 GiB from 20, not 10 from 11."""

    role: str
    weights: int
    optimizer: int = 0  # gradients, float32 masters, Adam's averages
    activations: int = 0
    cache: int = 0  # keys and values of the sampler

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations + self.cache


def estimate(config: RunConfig, batches: BatchPlan, roles: list[RolePlacement]) -> list[RoleMemory] | None:
    """Bytes per device for every role whose model can be looked at; None when the policy's cannot (a hub id)."""
    policy = read_shape(config.model.path)
    if policy is None:
        return None
    paths = {"critic": config.critic.path, "reference": config.reference.path}
    if config.reward.model is not None:
        paths["reward model"] = config.reward.model.path
    found = []
    for place in roles:
        path = paths.get(place.role)
        shape = read_shape(path) if path else policy
        if shape is not None:
            found.append(_role(config, batches, place, shape))
    return found


def _role(config: RunConfig, batches: BatchPlan, place: RolePlacement, shape: ModelShape) -> RoleMemory:
    width = BYTES[config.model.compute_dtype]
    if place.role == "rollout":
        slots = min(config.rollout.max_concurrent_sequences, batches.sequences_per_step)
        tokens = slots * (config.data.max_prompt_tokens + config.rollout.max_response_tokens)
        shares = config.rollout.engine == "native"  # it reads the policy's own weights
        return RoleMemory(
            role=place.role,
            weights=0 if shares else shape.parameters * width // place.devices_per_copy,
            cache=tokens * 2 * shape.layers * shape.key_value_width * width // place.devices_per_copy,
        )
    # Sharding (fsdp, deepspeed, megatron's distributed optimizer) spreads what is kept over all devices of the role.
    shards = len(place.devices)
    if place.role in ("reference", "reward model"):
        without_adapter = place.role == "reference" and config.policy.lora and shares_policy(config)
        return RoleMemory(role=place.role, weights=0 if without_adapter else shape.parameters * width // shards)
    section, plan = (config.critic, batches.critic) if place.role == "critic" else (config.policy, batches)
    assert plan is not None
    trained_width = BYTES[config.model.master_dtype]
    masters = trained_width if width < trained_width else 0  # otherwise the weights are their own masters
    trained = ADAPTER * shape.layers * shape.hidden * section.lora.rank if section.lora else shape.parameters
    tokens = section.max_tokens_per_micro_batch or (plan.sequences_per_micro_batch_per_device or 1) * (
        config.data.max_prompt_tokens + config.rollout.max_response_tokens
    )
    checkpointing = (config.critic if place.role == "critic" else config.model).gradient_checkpointing
    per_token = shape.hidden * (shape.layers + ACTIVATIONS if checkpointing else shape.layers * ACTIVATIONS)
    return RoleMemory(
        role=place.role,
        weights=shape.parameters * width // shards,
        optimizer=trained * (ADAM * trained_width + masters) // shards,
        activations=tokens * per_token * width // place.devices_per_copy,
    )


def shares_policy(config: RunConfig) -> bool:
    """Whether the reference starts from the policy's weights."""
    return config.reference.path in (None, config.model.path)


def read_shape(path: str) -> ModelShape | None:
    """The shape of the model in a local folder; None when there is none, or its config.json does not say enough."""
    folder = Path(path).expanduser()
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = values.get("text_config", values)
        layers, hidden, heads = text["num_hidden_layers"], text["hidden_size"], text["num_attention_heads"]
        head = text.get("head_dim") or hidden // heads
        kv = (text.get("num_key_value_heads") or heads) * head
        return ModelShape(
            parameters=_stored(folder) or _counted(text), layers=layers, hidden=hidden, key_value_width=kv
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # an estimate that cannot be made; what is wrong with the folder is for check_run_files to say


def _stored(folder: Path) -> int:
    """Weights in the safetensors files, read off their headers; 0 when there are none."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for dimension in tensor["shape"]:
                    size *= dimension
                count += size
    return count


def _counted(text: Mapping[str, Any]) -> int:
    """Weights of a decoder of the Llama kind: embeddings, attention, a gated MLP, one for each expert where there are some."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    head = text.get("head_dim") or hidden // heads
    kv_heads = text.get("num_key_value_heads") or heads
    attention = hidden * head * (heads + 2 * kv_heads) + heads * head * hidden
    experts = text.get("num_experts") or text.get("num_local_experts") or 1
    inner = text.get("moe_intermediate_size") or text["intermediate_size"]
    embeddings = text["vocab_size"] * hidden * (1 if text.get("tie_word_embeddings") else 2)
    per_layer = attention + 3 * hidden * inner * experts + 2 * hidden
    return int(embeddings + text["num_hidden_layers"] * per_layer + hidden)
