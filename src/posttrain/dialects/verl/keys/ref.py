"""Keys of actor_rollout_ref.ref: the frozen model of the KL."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped
from posttrain.dialects.verl.keys.shared import precision_rows, profiler_rows, sharding_rows
from posttrain.dialects.verl.keys.words import ACTOR, ALWAYS_FUSED, REF

_FOLLOWS = "the reference follows the actor, in verl too"

ROWS: tuple[Key, ...] = (
    mapped(
        f"{REF}.log_prob_micro_batch_size",
        int | None,
        None,
        "reference.sequences_per_micro_batch_per_device",
        "deprecated: sequences per forward pass, on all devices together",
        by_rule=True,
        change="sequences on all devices / data-parallel size = sequences per device",
    ),
    mapped(
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        int | None,
        None,
        "reference.sequences_per_micro_batch_per_device",
        "sequences per forward pass on one device",
        by_rule=True,
        change="one size with rollout.log_prob_micro_batch_size_per_gpu: the smaller of the two",
        note="verl's page shows 16; its file says null, so one of the two sizes must be given where there is a reference.",
    ),
    mapped(
        f"{REF}.log_prob_use_dynamic_bsz",
        bool,
        f"${{{ACTOR}.use_dynamic_bsz}}",
        "reference.max_tokens_per_micro_batch",
        "cut these passes by tokens",
        by_rule=True,
    ),
    mapped(
        f"{REF}.log_prob_max_token_len_per_gpu",
        int,
        f"${{{ACTOR}.ppo_max_token_len_per_gpu}}",
        "reference.max_tokens_per_micro_batch",
        "tokens per pass and device",
        by_rule=True,
    ),
    mapped(
        f"{REF}.model.path",
        str | None,
        ABSENT,
        "reference.path",
        "weights of the reference; null: the actor's",
        by_rule=True,
        since="later",
    ),
    ignored(
        f"{REF}.ulysses_sequence_parallel_size",
        int,
        f"${{{ACTOR}.ulysses_sequence_parallel_size}}",
        _FOLLOWS,
        "devices that share a sequence",
    ),
    ignored(f"{REF}.strategy", Literal["fsdp", "fsdp2", "megatron"], ABSENT, _FOLLOWS, "training engine"),
    ignored(f"{REF}.load_weight", bool, ABSENT, "weights are always loaded", "Megatron: load the weights"),
    ignored(f"{REF}.use_torch_compile", bool, True, "it changes speed, never the result", "compile", since="0.4"),
    ignored(f"{REF}.entropy_from_logits_with_chunking", bool, False, ALWAYS_FUSED, "entropy in chunks", since="0.4"),
    ignored(f"{REF}.entropy_checkpointing", bool, False, ALWAYS_FUSED, "recompute the entropy", since="0.4"),
    mapped(f"{REF}.megatron.**", Any, ABSENT, "reference.engine_options", "settings of Megatron", by_rule=True),
    *sharding_rows(f"{REF}.fsdp_config", "reference.engine_options", trained=False),
    *precision_rows(f"{REF}.fsdp_config", decides=False),
    *profiler_rows(REF),
)
