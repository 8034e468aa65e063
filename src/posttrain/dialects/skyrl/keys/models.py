"""Keys of trainer.policy, critic, ref and reward: weights, optimizers, and how the engines shard."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, refused

SECTIONS = {"policy": "policy", "critic": "critic", "ref": "reference"}  # their role -> our section
_NO_REWARD_MODEL = "SkyRL has no reward model to set up"


def _optimizer(role: str, lr: float) -> tuple[Key, ...]:
    keys, ours = f"trainer.{role}.optimizer_config", SECTIONS[role]
    return (
        mapped(f"{keys}.lr", float, lr, f"{ours}.optimizer.lr", f"peak learning rate of the {ours}", by_rule=True),
        mapped(
            f"{keys}.adam_betas",
            list[float],
            [0.9, 0.999],
            f"{ours}.optimizer.betas",
            "decay rates of AdamW's two running averages",
            by_rule=True,
        ),
        mapped(
            f"{keys}.weight_decay",
            float,
            1e-2,
            f"{ours}.optimizer.weight_decay",
            "decoupled weight decay, on every weight",
            by_rule=True,
        ),
        mapped(
            f"{keys}.max_grad_norm",
            float,
            1.0,
            f"{ours}.optimizer.max_grad_norm",
            "clip the global gradient norm to this; 0 or less: do not",
            by_rule=True,
            change="0 or less: null",
            note="SkyRL's page reads as if gradients were always scaled to this norm; only larger ones are.",
        ),
        mapped(
            f"{keys}.offload_after_step",
            bool,
            True,
            f"{ours}.engine_options.offload_after_step",
            "optimizer state leaves the device together with the weights; DeepSpeed requires true",
            by_rule=True,
        ),
        mapped(
            f"{keys}.num_warmup_steps",
            int,
            0,
            f"{ours}.schedule.warmup_updates",
            "updates (not steps) of linear warm-up",
            by_rule=True,
            since="2025-08",
        ),
        mapped(
            f"{keys}.scheduler",
            str,
            "constant_with_warmup",
            f"{ours}.schedule.name {ours}.schedule.min_lr_ratio",
            "shape of the learning rate, by its name in transformers",
            by_rule=True,
            since="2025-08",
            change="constant, constant_with_warmup: constant; linear, cosine: as they are; inverse_sqrt: inverse_square_root; "
            "cosine_with_restarts: cosine, as it has one cycle; polynomial: linear, down to 1e-7 / lr",
            note="SkyRL counts a decaying schedule's length in steps though it moves once per update, so it ends early; here "
            "it ends with the run.",
        ),
    )


def _sharding(role: str, *, cpu_offload: bool) -> tuple[Key, ...]:
    keys, options = f"trainer.{role}.fsdp_config", f"{SECTIONS[role]}.engine_options"
    shown: list[tuple[str, Any, Any, str, dict[str, Any]]] = [
        ("cpu_offload", bool, cpu_offload, "FSDP: weights and optimizer state live in CPU memory", {}),
        (
            "reshard_after_forward",
            bool | int,
            True,
            "FSDP2: shard again after the forward pass, or to a group size",
            {},
        ),
        ("fsdp_size", int, -1, "devices that shard a copy; below 0: all of them", {}),
        ("wrap_policy", dict | None, None, "FSDP: which layers are sharded as one", {}),
        ("mixed_precision", dict | None, None, "FSDP: dtypes of weights, gradient reduction and buffers", {}),
    ]
    if role == "ref":
        shown[0][-1]["note"] = "true until September 2025, false from then on."
    return tuple(
        mapped(f"{keys}.{name}", type, default, f"{options}.{name}", meaning, by_rule=True, **more)
        for name, type, default, meaning, more in shown
    )


def _below(keys: str, ours: str, meaning: str) -> tuple[Key, ...]:
    """Whatever a user writes below one of SkyRL's open sections."""
    return (mapped(f"{keys}.**", Any, ABSENT, ours, meaning, by_rule=True),)


def _deepspeed(role: str, kind: str) -> tuple[Key, ...]:
    keys, options = f"trainer.{role}.deepspeed_config", f"{SECTIONS[role]}.engine_options"
    return (
        mapped(
            keys,
            dict,
            f"${{deepspeed_config.{kind}}}",
            options,
            f"DeepSpeed settings of the {SECTIONS[role]}, with strategy deepspeed",
            by_rule=True,
            note="Hydra refuses to change single keys below this reference; here that works.",
        ),
        *_below(keys, options, f"one DeepSpeed setting of the {SECTIONS[role]}"),
    )


def _sequence_parallel(role: str, field: str) -> Key:
    return mapped(
        f"trainer.{role}.sequence_parallel_size",
        int,
        1,
        field,
        "devices that share one sequence (Ulysses); they see the same data",
        by_rule=True,
    )


def _lora(role: str) -> tuple[Key, ...]:
    keys, ours = f"trainer.{role}.model.lora", f"{SECTIONS[role]}.lora"
    shown: tuple[tuple[str, Any, Any, str], ...] = (
        ("rank", int, 0, "rank of the LoRA matrices; 0: none"),
        ("alpha", int | float, 16, "scale of the LoRA matrices, times their rank"),
        ("dropout", int | float, 0, "dropout on the inputs of the LoRA matrices"),
        ("target_modules", str | list[str], "all-linear", "layers with LoRA"),
        ("exclude_modules", str | list[str] | None, None, "layers without LoRA"),
    )
    sync = "a sampler in the same process reads the adapter where it is"
    start = "matrices start as in peft: A random (kaiming), B at 0"
    return (
        *(
            mapped(f"{keys}.{name}", type, default, f"{ours}.{name}", meaning, by_rule=True, since="later")
            for name, type, default, meaning in shown
        ),
        refused(f"{keys}.init_method", str, "kaiming", start, "how LoRA matrices start", since="later"),
        ignored(f"{keys}.lora_sync_path", str, "/tmp/skyrl_lora_sync", sync, "folder for LoRA syncs", since="later"),
    )


_POLICY: tuple[Key, ...] = (
    mapped(
        "trainer.policy.model.path",
        str,
        "Qwen/Qwen2.5-1.5B-Instruct",
        "model.path",
        "folder or hub id of the model; also of tokenizer, sampler and reference",
    ),
    *_lora("policy"),
    *_deepspeed("policy", "train"),
    *_optimizer("policy", 1e-6),
    *_sharding("policy", cpu_offload=False),
    _sequence_parallel("policy", "policy.sequence_parallel"),
    ignored(
        "trainer.policy.use_torch_compile",
        bool,
        False,
        "entropy and log-probs are computed in one pass over the logits already",
        "compile the entropy computation",
    ),
    mapped(
        "trainer.policy.record_memory",
        bool,
        False,
        "profiling.memory profiling.operators profiling.steps profiling.phases",
        "write a snapshot of device memory for every micro-batch",
        by_rule=True,
        change="a snapshot for the updates of every step, in the run folder",
    ),
    mapped(
        "trainer.policy.megatron_config.tensor_model_parallel_size",
        int,
        1,
        "policy.tensor_parallel",
        "Megatron: devices that share one layer's matrices",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.policy.megatron_config.pipeline_model_parallel_size",
        int,
        1,
        "policy.pipeline_parallel",
        "Megatron: devices that share the layers",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.policy.megatron_config.context_parallel_size",
        int,
        1,
        "policy.sequence_parallel",
        "Megatron: devices that share one sequence",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.policy.megatron_config.**",
        Any,
        ABSENT,
        "policy.engine_options",
        "further settings of Megatron",
        by_rule=True,
        since="later",
    ),
)

_CRITIC: tuple[Key, ...] = (
    mapped(
        "trainer.critic.model.path",
        str | None,
        None,
        "critic.path",
        "folder or hub id of the critic; null: none. Required by gae, unread by other estimators",
        by_rule=True,
    ),
    *_lora("critic"),
    *_deepspeed("critic", "train"),
    *_optimizer("critic", 5e-6),
    *_sharding("critic", cpu_offload=False),
    _sequence_parallel("critic", "critic.sequence_parallel"),
)

_REF: tuple[Key, ...] = (
    mapped(
        "trainer.ref.model.path",
        str | None,
        None,
        "reference.path",
        "folder or hub id of the reference; null: the policy's starting weights",
        by_rule=True,
        since="later",
        note="Since November 2025, with the policy's path as its default.",
    ),
    *_deepspeed("ref", "eval"),
    *_sharding("ref", cpu_offload=True),
    _sequence_parallel("ref", "reference.engine_options.sequence_parallel_size"),
    ignored(
        "trainer.ref.megatron_config.**",
        Any,
        ABSENT,
        "the reference is split as the policy is",
        "settings of Megatron",
        since="later",
    ),
)

_REWARD: tuple[Key, ...] = (
    refused(
        "trainer.reward.model.path",
        str | None,
        None,
        "SkyRL never had a reward model behind this key; this program's own is +posttrain.reward.model={path: FOLDER}",
        "a reward model",
        until="2025-06",
    ),
    *(
        ignored(f"trainer.reward.{name}", type, default, _NO_REWARD_MODEL, meaning, until="2025-06")
        for name, type, default, meaning in (
            ("deepspeed_config", dict, "${deepspeed_config.eval}", "DeepSpeed settings of a reward model"),
            ("deepspeed_config.**", Any, ABSENT, "one DeepSpeed setting of a reward model"),
            ("fsdp_config.cpu_offload", bool, True, "its weights live in CPU memory"),
            ("fsdp_config.reshard_after_forward", bool | int, True, "shard it again after the forward pass"),
            ("fsdp_config.fsdp_size", int, -1, "devices that shard a copy of it"),
            ("fsdp_config.wrap_policy", dict | None, None, "which of its layers are sharded as one"),
            ("fsdp_config.mixed_precision", dict | None, None, "its dtypes"),
            ("sequence_parallel_size", int, 1, "devices that share one sequence"),
        )
    ),
)

ROWS: tuple[Key, ...] = (*_POLICY, *_CRITIC, *_REF, *_REWARD)
