"""Rows that several roles have alike: sharding, precision, checkpoint contents, profilers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, refused
from posttrain.dialects.verl.keys.words import ACTOR, OWN_PROFILER, PRECISION

_EVERYTHING = ("model", "optimizer", "extra")
_ONE_CHECKPOINT = f"a checkpoint holds actor and critic together; {ACTOR}.checkpoint says what is in it"


def sharding_rows(section: str, options: str, *, trained: bool, since: str = "") -> tuple[Key, ...]:
    """``section`` is a fsdp_config; ``options`` our engine_options of the role."""
    later = since or "0.4"
    rows: list[Key] = [
        mapped(
            f"{section}.wrap_policy.min_num_params",
            int,
            0,
            f"{options}.wrap_policy.min_num_params",
            "shard modules of at least so many parameters; 0: by layer",
            since=since,
        ),
        mapped(
            f"{section}.wrap_policy.transformer_layer_cls_to_wrap",
            list[str] | str,
            ABSENT,
            f"{options}.wrap_policy.transformer_layer_cls_to_wrap",
            "classes of the layers to shard",
            since=since,
        ),
        mapped(
            f"{section}.wrap_policy.disable",
            bool,
            ABSENT,
            f"{options}.wrap_policy.disable",
            "shard the model as one",
            since=since,
        ),
        mapped(
            f"{section}.param_offload",
            bool,
            False,
            f"{options}.param_offload",
            "keep parameters on the CPU between phases",
            since=since,
            note="Each device's part leaves while other models of its process work."
            if trained
            else "Frozen weights rest on the CPU in parts, as with offload_policy.",
        ),
        mapped(
            f"{section}.reshard_after_forward",
            bool,
            True,
            f"{options}.reshard_after_forward",
            "FSDP2: free gathered parameters after the forward pass",
            since=later,
            note="Read with the strategy fsdp as well, which runs on FSDP2 here.",
        ),
        mapped(
            f"{section}.forward_prefetch",
            bool,
            False,
            f"{options}.forward_prefetch",
            "gather the next layer early",
            since=later,
        ),
        mapped(
            f"{section}.use_orig_params",
            bool,
            ABSENT,
            f"{options}.use_orig_params",
            "keep parameter views",
            since=since,
            note="FSDP1's; FSDP2 always keeps the model's parameters as they are, and a warning says so.",
        ),
        mapped(
            f"{section}.mixed_precision.reduce_dtype",
            str,
            ABSENT,
            f"{options}.mixed_precision.reduce_dtype",
            "precision in which gradients are summed",
            since=since,
        ),
        mapped(
            f"{section}.mixed_precision.buffer_dtype",
            str,
            ABSENT,
            f"{options}.mixed_precision.buffer_dtype",
            "precision of buffers",
            since=since,
            note="FSDP1's; buffers keep the precision that the model gives them, and a warning says so.",
        ),
    ]
    if trained:
        rows += [
            mapped(
                f"{section}.grad_offload",
                bool,
                ABSENT,
                f"{options}.grad_offload",
                "keep gradients on the CPU",
                note="No effect, and a warning says so: gradients are used at once.",
                earlier={"0.2": False},
                until="0.2",
                since=since,
            ),
            mapped(
                f"{section}.optimizer_offload",
                bool,
                False,
                f"{options}.optimizer_offload",
                "keep optimizer states on the CPU outside updates",
                since=since,
            ),
            mapped(
                f"{section}.offload_policy",
                bool,
                False,
                f"{options}.offload_policy",
                "FSDP2: offload everything",
                since=later,
            ),
            mapped(
                f"{section}.fsdp_size",
                int,
                -1,
                f"{options}.fsdp_size",
                "devices that share one copy of the weights; -1: all",
                since=since,
                note="verl 0.2 raises an error for anything but -1.",
            ),
            refused(
                f"{section}.model_dtype",
                str | None,
                ABSENT,
                "master weights are float32 here",
                "precision of the master weights",
                off=("fp32", "float32", "torch.float32"),
                since=since,
            ),
        ]
    # Which of these an engine gets depends on the strategy, so that a rule decides about all of them.
    return tuple(replace(row, by_rule=True) if row.status == "mapped" else row for row in rows)


def precision_rows(section: str, *, decides: bool) -> tuple[Key, ...]:
    """The precision of forward and backward passes in a fsdp_config; only the actor's decides ours."""
    names = (("mixed_precision.param_dtype", ""), ("dtype", "later"))
    what = "precision of forward and backward passes: bf16 or fp32"
    if not decides:
        return tuple(ignored(f"{section}.{name}", str, ABSENT, PRECISION, what, since=since) for name, since in names)
    return tuple(
        mapped(
            f"{section}.{name}",
            str,
            ABSENT,
            "model.compute_dtype",
            what,
            by_rule=True,
            change="bf16: bfloat16, fp32: float32; fp16 is refused",
            since=since,
        )
        for name, since in names
    )


CHECKPOINT_ROWS: tuple[Key, ...] = (
    mapped(
        f"{ACTOR}.checkpoint.save_contents",
        list[str],
        list(_EVERYTHING),
        "checkpoint.save_optimizer",
        "what is saved: model, optimizer, extra, hf_model",
        by_rule=True,
        change="without optimizer: false; weights are saved as a Hugging Face folder in any case, counters too",
        since="0.4",
    ),
    mapped(
        f"{ACTOR}.checkpoint.load_contents",
        list[str],
        f"${{{ACTOR}.checkpoint.save_contents}}",
        "checkpoint.load_optimizer checkpoint.load_schedule",
        "what is restored",
        by_rule=True,
        change="without optimizer: load_optimizer false; without extra: load_schedule false",
        since="0.4",
    ),
    mapped(
        f"{ACTOR}.checkpoint.contents",
        list[str],
        ABSENT,
        "checkpoint.save_optimizer checkpoint.load_optimizer checkpoint.load_schedule",
        "save_contents and load_contents by the name they had in 0.3",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        f"{ACTOR}.checkpoint.async_save",
        bool,
        ABSENT,
        "checkpoint.background",
        "save in the background",
        since="later",
        note="verl has it for Megatron only, and off; here it is on, and its numbers are the same.",
    ),
)

CRITIC_CHECKPOINT_ROWS: tuple[Key, ...] = (
    ignored(
        "critic.checkpoint.save_contents",
        list[str],
        list(_EVERYTHING),
        _ONE_CHECKPOINT,
        "what of the critic is saved",
        since="0.4",
    ),
    ignored(
        "critic.checkpoint.load_contents",
        list[str],
        "${critic.checkpoint.save_contents}",
        _ONE_CHECKPOINT,
        "what of the critic is restored",
        since="0.4",
    ),
    ignored(
        "critic.checkpoint.contents",
        list[str],
        ABSENT,
        _ONE_CHECKPOINT,
        "both by the name they had in 0.3",
        since="0.4",
    ),
    ignored(
        "critic.checkpoint.async_save",
        bool,
        ABSENT,
        _ONE_CHECKPOINT,
        "save in the background",
        since="later",
    ),
)


def profiler_rows(section: str) -> tuple[Key, ...]:
    """The profiler of a role."""
    return (
        ignored(
            f"{section}.profiler.discrete",
            bool,
            False,
            "every phase has a file of its own",
            "a file per phase",
            since="0.4",
        ),
        mapped(
            f"{section}.profiler.all_ranks",
            bool,
            False,
            "profiling.phases profiling.ranks",
            "profile this role, on all devices",
            by_rule=True,
            since="0.4",
        ),
        mapped(
            f"{section}.profiler.ranks",
            list[int] | None,
            None,
            "profiling.phases profiling.ranks",
            "profile this role, on these devices",
            by_rule=True,
            change="the ranks that any role names are profiled of all that are",
            since="0.4",
        ),
        mapped(
            f"{section}.profiler.enable",
            bool,
            ABSENT,
            "profiling.phases",
            "profile this role",
            by_rule=True,
            since="later",
        ),
        ignored(f"{section}.profiler.**", Any, ABSENT, OWN_PROFILER, "further settings", since="later"),
    )
