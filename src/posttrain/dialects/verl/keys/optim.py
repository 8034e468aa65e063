"""Rows of optim and megatron, which actor and critic have alike."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, refused


def optimizer_rows(section: str, role: str, *, lr: float) -> tuple[Key, ...]:
    """``section``.optim of ``role`` (policy, critic) for FSDP; what Megatron has beside it is in megatron_rows."""
    at, ours = f"{section}.optim", f"{role}.optimizer"
    schedule = f"{role}.schedule"
    of_actor = role == "policy"
    return (
        mapped(f"{at}.lr", float, lr, f"{ours}.lr", "peak learning rate"),
        mapped(
            f"{at}.lr_warmup_steps",
            int | None,
            -1,
            f"{schedule}.warmup_updates {schedule}.moves_every",
            "iterations of linear warm-up; negative: lr_warmup_steps_ratio counts",
            by_rule=True,
            change="iterations x updates per iteration = updates",
            since="0.4" if of_actor else "later",
            note="As in verl the learning rate moves once per iteration.",
        ),
        mapped(
            f"{at}.lr_warmup_steps_ratio",
            float,
            0.0,
            f"{schedule}.warmup_ratio",
            "warm-up as a share of the run",
            by_rule=True,
        ),
        mapped(
            f"{at}.min_lr_ratio",
            float | None,
            0.0 if of_actor else None,
            f"{schedule}.min_lr_ratio",
            "cosine: the floor, as a share of lr; null: 0",
            by_rule=True,
            earlier={"0.2": None},
            note="" if of_actor else "verl's critic does not read it; here it counts as the actor's does.",
        ),
        mapped(
            f"{at}.num_cycles",
            float,
            0.5 if of_actor else ABSENT,
            f"{schedule}.cycles",
            "cosine: half-waves times two",
            by_rule=True,
            since="0.4",
            note="" if of_actor else "verl's critic does not read it; here it counts as the actor's does.",
        ),
        mapped(
            f"{at}.warmup_style",
            Literal["constant", "cosine"],
            "constant",
            f"{schedule}.name",
            "shape of the learning rate after warm-up",
            by_rule=True,
            note="verl 0.2 reads constant whatever it says; here it counts.",
        ),
        mapped(
            f"{at}.lr_scheduler_type",
            Literal["constant", "cosine"],
            ABSENT,
            f"{schedule}.name",
            "the later name of warmup_style",
            by_rule=True,
            since="later",
        ),
        ignored(
            f"{at}.total_training_steps",
            int,
            -1,
            "the number of steps is computed, as verl's trainer does over this value",
            "overwritten by the program",
        ),
        mapped(
            f"{at}.weight_decay",
            float,
            0.01,
            f"{ours}.weight_decay",
            "decoupled weight decay",
            earlier={"0.2": ABSENT},
        ),
        mapped(f"{at}.betas", list[float], ABSENT, f"{ours}.betas", "decay rates of AdamW's two averages"),
        refused(
            f"{at}.optimizer",
            str,
            "adam",
            "AdamW is the optimizer here",
            "name of the optimizer (Megatron; later everywhere)",
            off=("AdamW", "adamw"),
            since="0.4",
        ),
        refused(
            f"{at}.optimizer_impl",
            str,
            ABSENT,
            "AdamW of torch is the optimizer here",
            "module the optimizer comes from",
            off=("torch.optim",),
            since="later",
        ),
        mapped(
            f"{at}.override_optimizer_config",
            dict | None,
            ABSENT,
            f"{ours}.eps {ours}.betas",
            "further arguments of the optimizer",
            by_rule=True,
            change="eps and betas; other arguments are refused",
            since="later",
        ),
        mapped(
            f"{at}.override_optimizer_config.**",
            Any,
            ABSENT,
            f"{ours}.eps {ours}.betas",
            "one further argument of the optimizer",
            by_rule=True,
            since="later",
        ),
        ignored(f"{at}.zero_indexed_step", bool, ABSENT, "updates count from 0 here", "count from 0", since="later"),
    )


def megatron_rows(section: str, role: str) -> tuple[Key, ...]:
    """``section``.optim and ``section``.megatron, which only strategy megatron reads."""
    at, schedule = f"{section}.optim", f"{role}.schedule"
    engine = f"{section}.megatron"
    options = f"{role}.engine_options"
    return (
        mapped(
            f"{at}.clip_grad",
            float,
            1.0,
            f"{role}.optimizer.max_grad_norm",
            "clip the global gradient norm to this (Megatron's name of grad_clip)",
            by_rule=True,
            since="0.4",
        ),
        mapped(
            f"{at}.lr_warmup_init",
            float,
            0.0,
            f"{schedule}.warmup_start_ratio",
            "learning rate at the start of the warm-up",
            by_rule=True,
            change="lr_warmup_init / lr",
            since="0.4",
        ),
        mapped(
            f"{at}.lr_decay_steps",
            int | None,
            None,
            f"{schedule}.decay_updates",
            "iterations until the floor, warm-up included; null: all",
            by_rule=True,
            change="iterations x updates per iteration = updates",
            since="0.4",
        ),
        mapped(
            f"{at}.lr_decay_style",
            Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"],
            "constant",
            f"{schedule}.name",
            "shape of the learning rate after warm-up",
            by_rule=True,
            change="inverse-square-root: inverse_square_root; WSD: warmup_stable_decay",
            since="0.4",
            note="Was linear until July 2025. verl's page writes inverse_square_root, which Megatron does not know.",
        ),
        mapped(
            f"{at}.min_lr",
            float,
            0.0,
            f"{schedule}.min_lr_ratio",
            "the floor of the learning rate",
            by_rule=True,
            change="min_lr / lr",
            since="0.4",
        ),
        refused(
            f"{at}.weight_decay_incr_style",
            Literal["constant", "linear", "cosine"],
            "constant",
            "start and end of verl's weight decay are the same number, so there is nothing to grow",
            "how weight decay grows",
            since="0.4",
        ),
        mapped(
            f"{at}.lr_wsd_decay_style",
            Literal["linear", "cosine", "exponential", "minus_sqrt"],
            "exponential",
            f"{schedule}.decay",
            "WSD: shape of the decay",
            by_rule=True,
            since="0.4",
        ),
        mapped(
            f"{at}.lr_wsd_decay_steps",
            int | None,
            None,
            f"{schedule}.stable_ratio",
            "WSD: iterations of the decay",
            by_rule=True,
            change="1 - decay / (total - warm-up), which takes trainer.total_training_steps",
            since="0.4",
        ),
        ignored(
            f"{at}.use_checkpoint_opt_param_scheduler",
            bool,
            False,
            "a resumed run goes on with the schedule of its configuration, at the update it had reached",
            "take the schedule from the checkpoint",
            since="0.4",
        ),
        mapped(
            f"{engine}.tensor_model_parallel_size",
            int,
            1,
            f"{role}.tensor_parallel",
            "devices that share a layer",
            by_rule=True,
        ),
        mapped(
            f"{engine}.pipeline_model_parallel_size",
            int,
            1,
            f"{role}.pipeline_parallel",
            "devices that share the layers",
            by_rule=True,
        ),
        mapped(
            f"{engine}.context_parallel_size",
            int,
            1,
            f"{role}.sequence_parallel",
            "devices that share a sequence",
            by_rule=True,
        ),
        mapped(f"{engine}.**", Any, ABSENT, options, "settings of Megatron", by_rule=True),
    )
