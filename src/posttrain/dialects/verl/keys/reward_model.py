"""Keys of reward_model about a model that scores responses."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned
from posttrain.dialects.verl.keys.shared import profiler_rows
from posttrain.dialects.verl.keys.words import ALWAYS_FUSED, ALWAYS_PACKED

_SERVED = "reward models in a sampler of their own"
_ONE_DEVICE_MODEL = "the reward model only runs forward, whole, on one device"

ROWS: tuple[Key, ...] = (
    mapped(
        "reward_model.enable",
        bool,
        False,
        "reward.model.path reward.terms",
        "score with a reward model",
        by_rule=True,
        change="its score takes the place of all other terms, as in verl",
    ),
    mapped(
        "reward_model.model.path",
        str,
        "~/models/FsfairX-LLaMA3-RM-v0.1",
        "reward.model.path",
        "folder or hub id of a sequence or token classification model with one label",
        by_rule=True,
        note="verl's page shows ~/models/Anomy-RM-v0.1.",
    ),
    mapped(
        "reward_model.model.input_tokenizer",
        str | None,
        "${actor_rollout_ref.model.path}",
        "reward.model.own_template",
        "not null: write the conversation again with the reward model's own template; null: give it the policy's tokens",
        by_rule=True,
        change="not null: true, null: false",
    ),
    mapped(
        "reward_model.model.external_lib",
        list[str] | str | None,
        "${actor_rollout_ref.model.external_lib}",
        "model.external_modules",
        "Python modules imported before the model is loaded",
        by_rule=True,
        change="one list with those of the actor and the critic",
    ),
    mapped(
        "reward_model.model.trust_remote_code",
        bool,
        False,
        "reward.model.trust_remote_code",
        "let code from the model's folder run",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "reward_model.micro_batch_size",
        int | None,
        None,
        "reward.model.sequences_per_micro_batch_per_device",
        "deprecated: sequences per forward pass, on all devices together",
        by_rule=True,
        change="sequences on all devices / devices = sequences per device",
    ),
    mapped(
        "reward_model.micro_batch_size_per_gpu",
        int | None,
        None,
        "reward.model.sequences_per_micro_batch_per_device",
        "sequences per forward pass on one device",
        by_rule=True,
        note="verl's page shows 16; its file says null, so one of the two sizes must be given.",
    ),
    mapped(
        "reward_model.max_length",
        int | None,
        None,
        "reward.model.max_tokens",
        "longest conversation, tokens; null: not cut",
        by_rule=True,
        note="verl cuts the end of longer ones, with the response in it; here they lose their beginning. Without it verl cuts "
        "at the longest prompt and response, and here nothing is cut.",
    ),
    planned(
        "reward_model.truncation",
        str,
        ABSENT,
        "other ends to cut conversations at",
        "which end is cut",
        off=("left",),
    ),
    ignored(
        "reward_model.use_dynamic_bsz",
        bool,
        "${critic.use_dynamic_bsz}",
        "the reward model's passes are cut by sequences; it changes memory and speed only",
        "cut passes by tokens",
        since="0.4",
    ),
    ignored(
        "reward_model.forward_max_token_len_per_gpu",
        int,
        "${critic.forward_max_token_len_per_gpu}",
        "the reward model's passes are cut by sequences; it changes memory and speed only",
        "tokens per pass and device",
        since="0.4",
    ),
    ignored(
        "reward_model.strategy",
        Literal["fsdp", "fsdp2", "megatron"],
        "${actor_rollout_ref.actor.strategy}",
        _ONE_DEVICE_MODEL,
        "engine",
    ),
    ignored(
        "reward_model.ulysses_sequence_parallel_size",
        int,
        1,
        _ONE_DEVICE_MODEL,
        "devices that share a sequence",
        since="0.4",
    ),
    ignored("reward_model.model.use_shm", bool, False, "weights are loaded once", "copy to /dev/shm", since="0.4"),
    ignored("reward_model.model.use_remove_padding", bool, False, ALWAYS_PACKED, "pack sequences", since="0.4"),
    ignored("reward_model.model.use_fused_kernels", bool, False, ALWAYS_FUSED, "fused kernels", since="0.4"),
    *(
        ignored(f"reward_model.model.fsdp_config.{name}", type, default, _ONE_DEVICE_MODEL, meaning, since=since)
        for name, type, default, meaning, since in (
            ("min_num_params", int, ABSENT, "shard modules of at least so many parameters (0.2 and the page)", ""),
            ("wrap_policy.min_num_params", int, 0, "shard modules of at least so many parameters", ""),
            ("wrap_policy.transformer_layer_cls_to_wrap", list[str] | str, ABSENT, "classes of layers to shard", ""),
            ("param_offload", bool, False, "keep the weights on the CPU", ""),
            ("fsdp_size", int, -1, "devices that share one copy", "0.4"),
            ("reshard_after_forward", bool, True, "FSDP2: free gathered parameters", "0.4"),
            ("forward_prefetch", bool, False, "gather the next layer early", "0.4"),
        )
    ),
    ignored("reward_model.megatron.**", Any, ABSENT, _ONE_DEVICE_MODEL, "settings of Megatron"),
    *profiler_rows("reward_model"),
    planned("reward.reward_model.enable", bool, ABSENT, _SERVED, "score with a model", off=(False,), since="later"),
    ignored(
        "reward.reward_model.**",
        Any,
        ABSENT,
        "only reward.reward_model.enable (planned) reads it; reward_model.enable is built",
        "its settings",
        since="later",
    ),
    mapped(
        "reward_model.enable_resource_pool",
        bool,
        ABSENT,
        "reward.model.devices placement.devices",
        "the reward model has devices of its own, beside the trainer's",
        by_rule=True,
        since="later",
    ),
    mapped(
        "reward_model.n_gpus_per_node",
        int,
        ABSENT,
        "reward.model.devices placement.devices",
        "with enable_resource_pool: its devices of each machine",
        by_rule=True,
        change="x nnodes = its devices",
        since="later",
    ),
    mapped(
        "reward_model.nnodes",
        int,
        ABSENT,
        "reward.model.devices placement.devices",
        "with enable_resource_pool: machines of its own",
        by_rule=True,
        change="x n_gpus_per_node = its devices",
        since="later",
    ),
    ignored(
        "reward_model.rollout.**",
        Any,
        ABSENT,
        "only a reward model in a sampler of its own (planned) reads it",
        "its sampler",
        since="later",
    ),
)
