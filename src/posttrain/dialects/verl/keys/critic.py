"""Keys of critic: the model that estimates values, which only gae needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned
from posttrain.dialects.verl.keys.lora import lora_rows
from posttrain.dialects.verl.keys.optim import megatron_rows, optimizer_rows
from posttrain.dialects.verl.keys.shared import CRITIC_CHECKPOINT_ROWS, precision_rows, profiler_rows, sharding_rows
from posttrain.dialects.verl.keys.words import ACTOR, ALWAYS_PACKED, ROLLOUT

_VALUES = "values are computed in micro-batches of the critic's update; it changes memory and speed only"

_MODEL: tuple[Key, ...] = (
    mapped(
        "critic.model.path",
        str,
        "~/models/deepseek-llm-7b-chat",
        "critic.path",
        "folder or hub id of the starting weights",
        by_rule=True,
        change="null where it is the actor's path",
    ),
    ignored(
        "critic.model.tokenizer_path",
        str,
        "${actor_rollout_ref.model.path}",
        "the critic sees the policy's token ids",
        "folder of the tokenizer",
    ),
    planned(
        "critic.model.override_config",
        dict,
        {},
        "critics with another configuration than their folder's",
        "fields of config.json to set",
        off=({"model_config": {}, "moe_config": {"freeze_moe_router": False}}, {"model_config": {}}),
    ),
    planned(
        "critic.model.override_config.**",
        Any,
        ABSENT,
        "critics with another configuration than their folder's",
        "one of them",
        off=({}, False),
    ),
    mapped(
        "critic.model.external_lib",
        list[str] | str | None,
        "${actor_rollout_ref.model.external_lib}",
        "model.external_modules",
        "Python modules imported before the model is loaded",
        by_rule=True,
        change="one list with those of the actor and the reward model",
    ),
    mapped(
        "critic.model.enable_gradient_checkpointing",
        bool,
        True,
        "critic.gradient_checkpointing",
        "recompute activations in the backward pass",
        by_rule=True,
        note="True in the FSDP file, False in the Megatron file.",
    ),
    mapped(
        "critic.model.enable_activation_offload",
        bool,
        False,
        "critic.activation_offload",
        "move activations to the CPU between forward and backward",
        by_rule=True,
        since="0.4",
    ),
    ignored(
        "critic.model.use_remove_padding",
        bool,
        False,
        ALWAYS_PACKED,
        "pack sequences; must be true with sequence parallelism",
    ),
    ignored(
        "critic.model.trust_remote_code",
        bool,
        False,
        "actor and critic share one switch, actor_rollout_ref.model.trust_remote_code",
        "let code from the model's folder run",
        since="0.4",
    ),
    ignored("critic.model.use_shm", bool, False, "weights are loaded once", "copy them to /dev/shm", since="0.4"),
    *lora_rows("critic.model", "critic"),
)

_UPDATE: tuple[Key, ...] = (
    ignored(
        "critic.enable",
        bool | None,
        ABSENT,
        "a critic is there where the estimator needs one; anything else is refused",
        "whether there is a critic; null: where the estimator needs one",
        since="later",
    ),
    mapped(
        "critic.strategy",
        Literal["fsdp", "fsdp2", "megatron"],
        f"${{{ACTOR}.strategy}}",
        "critic.engine",
        "training engine, of the actor's family",
        by_rule=True,
        change="on one device: local",
    ),
    ignored("critic.rollout_n", int, f"${{{ROLLOUT}.n}}", "it follows rollout.n", "responses per prompt"),
    mapped(
        "critic.ppo_mini_batch_size",
        int,
        f"${{{ACTOR}.ppo_mini_batch_size}}",
        "critic.sequences_per_mini_batch",
        "prompts per update, on all devices together",
        by_rule=True,
        change="prompts x rollout.n = sequences",
    ),
    mapped(
        "critic.ppo_micro_batch_size",
        int | None,
        None,
        "critic.sequences_per_micro_batch_per_device",
        "deprecated: sequences per forward and backward pass, on all devices together",
        by_rule=True,
        change="sequences on all devices / data-parallel size = sequences per device",
    ),
    mapped(
        "critic.ppo_micro_batch_size_per_gpu",
        int | None,
        None,
        "critic.sequences_per_micro_batch_per_device",
        "sequences per forward and backward pass on one device",
        by_rule=True,
        note="null in verl's file, so one of the two sizes must be given.",
    ),
    ignored(
        "critic.forward_micro_batch_size",
        int | None,
        "${critic.ppo_micro_batch_size}",
        _VALUES,
        "sequences per pass of values, on all devices together",
    ),
    ignored(
        "critic.forward_micro_batch_size_per_gpu",
        int | None,
        "${critic.ppo_micro_batch_size_per_gpu}",
        _VALUES,
        "sequences per pass of values on one device",
    ),
    mapped(
        "critic.use_dynamic_bsz",
        bool,
        f"${{{ACTOR}.use_dynamic_bsz}}",
        "critic.max_tokens_per_micro_batch",
        "cut micro-batches by tokens",
        by_rule=True,
        change="true: ppo_max_token_len_per_gpu counts, false: the micro-batch size",
    ),
    mapped(
        "critic.ppo_max_token_len_per_gpu",
        int,
        32768,
        "critic.max_tokens_per_micro_batch",
        "tokens per micro-batch and device",
        by_rule=True,
    ),
    ignored(
        "critic.forward_max_token_len_per_gpu",
        int,
        "${critic.ppo_max_token_len_per_gpu}",
        _VALUES,
        "tokens per pass of values and device",
    ),
    mapped(
        "critic.ulysses_sequence_parallel_size",
        int,
        1,
        "critic.sequence_parallel",
        "devices that share a sequence",
        by_rule=True,
    ),
    mapped(
        "critic.ppo_epochs",
        int,
        f"${{{ACTOR}.ppo_epochs}}",
        "critic.epochs_per_step",
        "passes over an iteration's sequences",
        by_rule=True,
        change="null where it is the actor's",
    ),
    ignored(
        "critic.shuffle",
        bool,
        f"${{{ACTOR}.shuffle}}",
        "mini-batches are cut in order",
        "Megatron: shuffle before mini-batches are cut",
    ),
    ignored(
        "critic.data_loader_seed",
        int | None,
        f"${{{ACTOR}.data_loader_seed}}",
        "it is the seed of shuffled mini-batches, and they are cut in order",
        "Megatron: seed of shuffle",
        since="0.4",
    ),
    mapped(
        "critic.grad_clip",
        float,
        1.0,
        "critic.optimizer.max_grad_norm",
        "clip the global gradient norm to this",
        by_rule=True,
    ),
    mapped(
        "critic.cliprange_value",
        float | None,
        0.5,
        "critic.value_clip",
        "values move at most this far from the old ones; null: no limit",
        by_rule=True,
    ),
    mapped(
        "critic.loss_agg_mode",
        Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
        f"${{{ACTOR}.loss_agg_mode}}",
        "critic.aggregation",
        "how token losses become one number",
        by_rule=True,
        since="0.4",
    ),
    ignored("critic.load_weight", bool, ABSENT, "weights are always loaded", "Megatron: load the weights"),
)

_LIKE_THE_ACTOR: tuple[Key, ...] = (
    *optimizer_rows("critic", "critic", lr=1e-5),
    *megatron_rows("critic", "critic"),
    *sharding_rows("critic.model.fsdp_config", "critic.engine_options", trained=True),
    *precision_rows("critic.model.fsdp_config", decides=False),
    *CRITIC_CHECKPOINT_ROWS,
    *profiler_rows("critic"),
)

# A run without a critic has none of its settings, so that a rule decides about all of them.
ROWS: tuple[Key, ...] = (
    *_MODEL,
    *_UPDATE,
    *(replace(row, by_rule=True) if row.status == "mapped" else row for row in _LIKE_THE_ACTOR),
)
