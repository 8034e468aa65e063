"""Keys of actor_rollout_ref.model: the weights and how they are loaded."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned, refused
from posttrain.dialects.verl.keys.lora import lora_rows
from posttrain.dialects.verl.keys.words import ALWAYS_FUSED, ALWAYS_PACKED, FREEZE_ROUTER, MODEL

_WEIGHTS: tuple[Key, ...] = (
    refused(
        "actor_rollout_ref.hybrid_engine",
        bool,
        True,
        "actor and rollout share their devices here, as in verl, which has no other way either",
        "actor and rollout share their devices",
    ),
    ignored("actor_rollout_ref.nccl_timeout", int, ABSENT, "one device has no collectives to wait for", "seconds"),
    mapped(
        f"{MODEL}.path",
        str,
        "~/models/deepseek-llm-7b-chat",
        "model.path",
        "folder or hub id of weights and tokenizer, for actor, rollout and reference",
    ),
    mapped(
        f"{MODEL}.external_lib",
        list[str] | str | None,
        None,
        "model.external_modules",
        "Python modules imported before the model is loaded",
        by_rule=True,
        change="one list with those of the critic and the reward model",
        note="verl's page calls it external_libs in one place; the key is external_lib.",
    ),
    mapped(
        f"{MODEL}.override_config",
        dict,
        {},
        "model.config_overrides",
        "fields of the model's config.json to set",
        by_rule=True,
        change="for megatron, those below model_config",
        note="The nested form that verl's page shows is that of the Megatron file; the FSDP file's is flat. Both are read.",
    ),
    mapped(
        f"{MODEL}.override_config.**",
        Any,
        ABSENT,
        "model.config_overrides",
        "one field of the model's config.json",
        by_rule=True,
    ),
    mapped(
        f"{MODEL}.override_config.model_config",
        dict,
        ABSENT,
        "model.config_overrides",
        "the same, as the Megatron file nests them",
        by_rule=True,
    ),
    mapped(
        FREEZE_ROUTER,
        bool,
        ABSENT,
        "policy.engine_options.freeze_moe_router",
        "Megatron: routers of experts are not trained",
        by_rule=True,
    ),
    mapped(
        f"{MODEL}.trust_remote_code",
        bool,
        False,
        "model.trust_remote_code",
        "let code from the model's folder run",
        since="0.4",
    ),
    mapped(
        f"{MODEL}.custom_chat_template",
        str | None,
        None,
        "model.chat_template",
        "chat template, as text, in the place of the tokenizer's",
        since="0.4",
        note="verl 0.4 writes prompts with the tokenizer's own; here they have this one, as in later versions.",
    ),
    mapped(
        f"{MODEL}.tokenizer_path",
        str | None,
        ABSENT,
        "model.tokenizer_path",
        "folder of the tokenizer; null: the model's",
        since="later",
    ),
    planned(
        f"{MODEL}.hf_config_path",
        str | None,
        ABSENT,
        "a configuration apart from the weights",
        "folder of config.json; null: the model's",
        since="later",
    ),
    planned(
        f"{MODEL}.mtp.enable", bool, ABSENT, "heads for several tokens ahead", "train such", off=(False,), since="later"
    ),
    ignored(f"{MODEL}.mtp.**", Any, ABSENT, "only mtp.enable (planned) reads it", "their settings", since="later"),
    ignored(f"{MODEL}.use_shm", bool, False, "weights are loaded once", "copy the weights to /dev/shm", since="0.4"),
)

_COMPUTE: tuple[Key, ...] = (
    mapped(
        f"{MODEL}.enable_gradient_checkpointing",
        bool,
        True,
        "model.gradient_checkpointing",
        "recompute activations in the actor's backward pass",
        note="verl's page shows False; the FSDP file says True, the Megatron file False.",
    ),
    mapped(
        f"{MODEL}.enable_activation_offload",
        bool,
        False,
        "model.activation_offload",
        "move activations to the CPU between forward and backward",
        since="0.4",
    ),
    ignored(
        f"{MODEL}.use_remove_padding",
        bool,
        False,
        ALWAYS_PACKED,
        "pack sequences instead of padding them; must be true with sequence parallelism",
    ),
    ignored(
        f"{MODEL}.use_liger",
        bool,
        False,
        "it changes speed, never the result; posttrain.model.liger=true turns it on, on a GPU",
        "Liger kernels",
        since="0.4",
    ),
    ignored(f"{MODEL}.use_fused_kernels", bool, False, ALWAYS_FUSED, "log-probs without keeping logits", since="0.4"),
    ignored(
        f"{MODEL}.fused_kernel_options.impl_backend",
        Literal["torch", "triton"],
        "torch",
        ALWAYS_FUSED,
        "which implementation of the fused kernels",
        since="0.4",
    ),
    ignored(
        f"{MODEL}.tiled_mlp.**", Any, ABSENT, "it saves memory and changes no number", "MLP in tiles", since="later"
    ),
    *lora_rows(MODEL, "policy"),
    mapped(f"{MODEL}.freeze_vision_tower", bool, ABSENT, "model.freeze_vision", "do not train it", since="later"),
)

ROWS: tuple[Key, ...] = (*_WEIGHTS, *_COMPUTE)
