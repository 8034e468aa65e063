"""What a worker's keys become in each section that has them: one table per section, everything else with a reason."""

from __future__ import annotations

from typing import Literal

from posttrain.dialects.ledger import Key
from posttrain.dialects.roll.keys.role import Here, Planned, Role, by_rule, rows
from posttrain.dialects.roll.keys.strategy import SAMPLED, TRAINED
from posttrain.dialects.roll.keys.worker import Base

_C = "strategy_args.strategy_config"

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_square_root",
    "warmup_stable_decay": "warmup_stable_decay",
}


def _positive(value: int) -> int:
    return max(value, 0)


_ALONE = "a time limit or a setting between processes, which a run on one device does not have"
_BY_PIPELINE = "set by the pipeline in ROLL too"
_PACKED = "sequences are always packed here, never padded"
COMMON = {
    "name": "the section is the name",
    "world_size": "roles share one process on one device",
    "backend_timeout": _ALONE,
    "max_concurrency": _ALONE,
    "offload_nccl": _ALONE,
    "system_envs": "a configuration does not change the environment here: set variables where the run is started",
    "checkpoint_config": _BY_PIPELINE,
    "sequence_length_round_in_train": _PACKED,
    "sequence_length_round_in_infer": _PACKED,
    "use_sequence_packing": _PACKED,
    "sequence_packing_args.**": _PACKED,
    "logits_in_fp32": "log-probs are always computed in float32 here",
    "opd_kl_coef": "read by teachers of on-policy distillation only",
    "model_args.attn_implementation": "the fastest attention that the device has is taken",
    "model_args.flash_attn": "ROLL does not read it",
    "model_args.gradient_checkpointing_use_reentrant": "a choice between two ways to the same numbers",
    "model_args.num_labels": "a head has one output here",
    "model_args.model_type": "the section says what kind of model it is",
    "model_args.device_map": "read by hf_infer on several devices only",
    "training_args.num_train_epochs": "RLVR goes by max_steps",
    "training_args.save_hf_model": "every checkpoint holds its models as Hugging Face folders",
    "training_args.max_steps": _BY_PIPELINE,
    "training_args.seed": _BY_PIPELINE,
    "training_args.data_seed": _BY_PIPELINE,
    "training_args.dataloader_num_workers": "prompts are tokenized before the run; nothing is loaded in between",
    "training_args.bf16": "follows model_args.dtype, in ROLL too",
    "training_args.fp16": "follows model_args.dtype, in ROLL too",
    "training_args.tf32": "products are bfloat16, or float32 where float32 is asked for",
    "training_args.output_dir": _BY_PIPELINE,
    "training_args.logging_dir": _BY_PIPELINE,
    "data_args.eval_file_name": "read by SFT and DPO only",
    "data_args.dataset_dir": "ROLL does not read it: paths start at the current folder",
    "data_args.dataset_type": "the file's ending decides",
    "data_args.interleave_probs": "ROLL does not read it",
    "data_args.response": "for information only, in ROLL too",
    "data_args.id": "samples are found by file and row",
    "data_args.image_folder": "images are not read",
    "data_args.video_folder": "videos are not read",
    "data_args.audio_folder": "audio is not read",
    "data_args.custom_data_kwargs_func": "images and the like are not read",
    "generating_args.do_sample": "the temperature decides, as in ROLL's vLLM and SGLang; 0 is greedy",
    "generating_args.max_length": "max_new_tokens goes before it, and is sequence_length - prompt_length",
    "generating_args.max_new_tokens": "it is sequence_length - prompt_length (or response_length), in ROLL since 2025-06 too",
    "generating_args.length_penalty": "read by beam search only",
    "generating_args.logprobs": "the sampler's log-probs are always kept here",
}  # fmt: skip
FREEZE = "model_args.freeze_module_prefix"
TRAINED_PLANNED: dict[str, Planned] = {
    "router_replay.mode": ("replaying the choice of experts", ()),
    "mtp_training_mode": ("heads for several tokens ahead", ()),
    FREEZE: ("training a part of the model", ()),
    "model_args.moe_aux_loss_coef": ("the balance loss of experts", (0, 0.0)),
    "model_args.additional_target": ("modules trained in full beside LoRA adapters", ()),
}  # fmt: skip


def parallel(role: str) -> dict[str, Here]:
    return {
        f"{_C}.tensor_model_parallel_size": by_rule(f"{role}.tensor_parallel"),
        f"{_C}.pipeline_model_parallel_size": by_rule(f"{role}.pipeline_parallel"),
        f"{_C}.context_parallel_size": by_rule(f"{role}.sequence_parallel"),
        f"{_C}.recompute_granularity": by_rule(
            "model.gradient_checkpointing" if role == "policy" else f"{role}.gradient_checkpointing",
            "megatron: full and selective recompute, null does not",
        ),
        "model_args.ulysses_size": by_rule(f"{role}.sequence_parallel", "FSDP2 only"),
        "device_mapping": by_rule(f"{role}.devices {role}.engine placement.devices placement.nodes"),
        "strategy_args.strategy_name": by_rule(
            f"{role}.engine", "without _train, fsdp2 is fsdp; one device: local, which gives the same numbers"
        ),
    }


def lora(role: str) -> dict[str, Here]:
    return {
        "model_args.lora_target": by_rule(
            f"{role}.lora.target_modules", "all, all-linear: all-linear; names between commas: a list; null: no adapter"
        ),
        "model_args.lora_rank": by_rule(f"{role}.lora.rank {role}.lora.alpha", "read with lora_target"),
        "model_args.lora_alpha": by_rule(f"{role}.lora.alpha", "null: 2 x lora_rank; read with lora_target"),
        "model_args.lora_dropout": by_rule(f"{role}.lora.dropout", "read with lora_target"),
        "model_args.adapter_name_or_path": by_rule(f"{role}.lora.adapter_path", "read with lora_target"),
    }


def updates(role: str) -> dict[str, Here]:
    return {
        "training_args.learning_rate": Here(f"{role}.optimizer.lr"),
        "training_args.weight_decay": Here(f"{role}.optimizer.weight_decay"),
        "training_args.adam_beta1": by_rule(f"{role}.optimizer.betas", "the first of the two"),
        "training_args.adam_beta2": by_rule(f"{role}.optimizer.betas", "the second of the two"),
        "training_args.lr_scheduler_type": Here(f"{role}.schedule.name", "our names", SCHEDULES.get),
        "training_args.warmup_steps": Here(
            f"{role}.schedule.warmup_updates", "0: null, warmup_ratio counts", lambda value: value or None
        ),
        "training_args.warmup_ratio": by_rule(
            f"{role}.schedule.warmup_ratio {role}.schedule.warmup_rounding", "rounded up to whole updates"
        ),
        "training_args.per_device_train_batch_size": by_rule(
            f"{role}.sequences_per_micro_batch_per_device {role}.sequences_per_mini_batch",
            "x gradient_accumulation_steps x data-parallel ranks = sequences per update",
        ),
        "training_args.gradient_accumulation_steps": by_rule(
            f"{role}.sequences_per_mini_batch",
            "x per_device_train_batch_size x data-parallel ranks = sequences per update",
        ),
        "use_dynamic_batching_in_train": by_rule(f"{role}.max_tokens_per_micro_batch"),
        "max_tokens_per_microbatch_in_train": by_rule(f"{role}.max_tokens_per_micro_batch"),
    }


_LOSS_KEYS = {
    "worker_cls": by_rule("loss.name", "the PG worker classes: the loss that pg_variant names"),
    "pg_variant": by_rule(
        "loss.name loss.clip_ratio_low loss.clip_ratio_high loss.dro_beta",
        "vanilla: gpg; ppo: ppo_clip; tis and cispo: cispo; kimi15: dro; topr: topr",
    ),
    "tis_lower_bound": by_rule("loss.clip_ratio_low", "1 - the bound"),
    "tis_upper_bound": by_rule("loss.clip_ratio_high", "the bound - 1"),
    "cispo_epsilon_low": by_rule("loss.clip_ratio_low"),
    "cispo_epsilon_high": by_rule("loss.clip_ratio_high"),
    "cispo_use_unified_mask": by_rule("loss.drop_clipped"),
    "kimi15_tau": by_rule("loss.dro_beta"),
    "topr_positive_weight": by_rule("loss.positive_weight"),
    "topr_negative_weight": by_rule("loss.negative_weight"),
}
_FORWARD = {
    "infer_batch_size": by_rule(
        "reference.sequences_per_micro_batch_per_device",
        "old log-probs and the reference share one size here, the smaller of the two",
    ),
    "use_dynamic_batching_in_infer": by_rule("reference.max_tokens_per_micro_batch"),
    "max_tokens_per_microbatch_in_infer": by_rule("reference.max_tokens_per_micro_batch"),
}

SAVING: dict[str, Here] = {
    f"{_C}.save_only_model": by_rule("checkpoint.save_optimizer", "not; FSDP2 only"),
    f"{_C}.async_save_ckpt": by_rule("checkpoint.background", "FSDP2 only"),
}
_SAVED_TOGETHER = dict.fromkeys(SAVING, "actor_train's says how the checkpoint of all is written")

ACTOR_TRAIN = Role(
    section="actor_train",
    strategy=Literal["megatron_train", "deepspeed_train", "fsdp2_train", "local"],
    always=True,
    otherwise="the trained policy neither samples nor judges",
    mapped={
        **parallel("policy"),
        **updates("policy"),
        **lora("policy"),
        **_LOSS_KEYS,
        **_FORWARD,
        **SAVING,
        "model_args.model_name_or_path": by_rule("model.path", "null: pretrain"),
        "model_args.dtype": by_rule("model.compute_dtype", "bf16: bfloat16, fp32: float32; master weights are float32"),
        "model_args.disable_gradient_checkpointing": by_rule("model.gradient_checkpointing", "not"),
        "model_args.model_config_kwargs": Here("model.config_overrides"),
        "data_args.template": by_rule("data.chat_template_options", "qwen3: enable_thinking true; native: nothing"),
        "data_args.file_name": by_rule("data.train_files"),
        "data_args.prompt": by_rule("data.prompt_column"),
        "data_args.messages": by_rule("data.prompt_column"),
        "data_args.tag": by_rule("data.data_source_column", "only when written; else the loader looks"),
        "data_args.preprocessing_num_workers": Here("data.filter_workers", "null: 1", lambda value: value or 1),
        "data_args.image_folder": Here("data.image_folder"),
        FREEZE: by_rule("model.freeze_vision", "the vision tower: true; other modules are planned"),
    },
    planned={
        **{name: reason for name, reason in TRAINED_PLANNED.items() if name != FREEZE},
        "model_update_frequency": ("a sampler that keeps older weights for several steps", ()),
        "apply_loss_scale": ("losses divided by other counts than the update's", ()),
        "data_args.dataset_type": ("data from a service", ("arrow", "csv", "jsonl", "parquet", "txt")),
        "data_args.video_folder": ("videos in prompts", ()),
        "data_args.audio_folder": ("audio in prompts", ()),
        "data_args.custom_data_kwargs_func": ("a function that reads rows", ()),
    },
    ignored={
        **COMMON,
        "num_gpus_per_worker": "a training worker has one device, in ROLL too",
        "data_args.domain_interleave_probs": "one domain makes up the whole step; several are planned",
    },
    config=TRAINED,
    options="policy.engine_options",
)  # fmt: skip

CRITIC = Role(
    section="critic",
    strategy=Literal["megatron_train", "deepspeed_train", "fsdp2_train", "local"],
    otherwise="a critic neither samples nor reads data",
    mapped={
        **parallel("critic"),
        **updates("critic"),
        **lora("critic"),
        "model_args.model_name_or_path": by_rule("critic.path", "null: reward_pretrain; the policy's own path is null here"),
        "model_args.disable_gradient_checkpointing": by_rule("critic.gradient_checkpointing", "not"),
    },
    planned=TRAINED_PLANNED,
    ignored={
        **COMMON,
        **_SAVED_TOGETHER,
        "worker_cls": "there is one kind of critic",
        "num_gpus_per_worker": "a training worker has one device, in ROLL too",
        "infer_batch_size": "values are computed in the micro-batches of the critic's training",
        "use_dynamic_batching_in_infer": "values are computed in the micro-batches of the critic's training",
        "max_tokens_per_microbatch_in_infer": "values are computed in the micro-batches of the critic's training",
        "model_args.dtype": "the critic computes in actor_train's precision",
        "model_args.model_config_kwargs": "the critic takes its model's own configuration",
    },
    config=TRAINED,
    options="critic.engine_options",
)  # fmt: skip

REFERENCE = Role(
    section="reference",
    strategy=Literal["megatron_infer", "deepspeed_infer", "fsdp2_infer", "hf_infer", "megatron_train", "deepspeed_train",
                     "fsdp2_train", "local"],
    otherwise="the reference is neither trained nor sampled from",
    mapped={
        **_FORWARD,
        "model_args.model_name_or_path": by_rule("reference.path", "null: pretrain; the policy's own path is null here"),
        "device_mapping": by_rule("reference.devices placement.devices placement.nodes"),
    },
    ignored={
        **COMMON,
        **_SAVED_TOGETHER,
        "strategy_args.strategy_name": "the reference runs in the policy's engine",
        "model_args.dtype": "the reference computes in actor_train's precision",
        "num_gpus_per_worker": "a worker of these strategies has one device, in ROLL too",
    },
    config=TRAINED,
    options="reference.engine_options",
)  # fmt: skip

_SAMPLING_PLANNED: dict[str, Planned] = {
    "generating_args.num_beams": ("beam search", ()),
    "generating_args.include_stop_str_in_output": ("responses without their stop text", (True,)),
}


def _sampling(role: str) -> dict[str, Here]:
    return {
        "generating_args.temperature": Here(f"{role}.temperature"),
        "generating_args.top_p": Here(f"{role}.top_p"),
        "generating_args.repetition_penalty": by_rule(f"{role}.engine_sampling.repetition_penalty", "1: nothing"),
        "generating_args.stop_strings": Here(f"{role}.stop", "null: none", lambda value: value or []),
        "generating_args.top_k": Here(f"{role}.top_k", "-1: 0", _positive),
    }


ACTOR_INFER = Role(
    section="actor_infer",
    strategy=Literal["vllm", "sglang", "hf_infer", "native"] | None,
    default_strategy=None,
    first_strategy=None,
    always=True,
    otherwise="the sampler is not trained and reads no data",
    mapped={
        **_sampling("rollout"),
        "generating_args.max_new_tokens": by_rule("rollout.max_response_tokens", "agentic: tokens of a turn"),
        "device_mapping": by_rule("rollout.devices placement.devices placement.nodes"),
        "num_gpus_per_worker": by_rule("rollout.tensor_parallel", "sglang and hf_infer; vllm goes by its own sizes"),
        "strategy_args.strategy_name": by_rule("rollout.engine", "hf_infer: hf; null: native"),
        f"{_C}.tensor_parallel_size": by_rule("rollout.tensor_parallel"),
    },
    planned=_SAMPLING_PLANNED,
    ignored={
        **COMMON,
        "generating_args.num_return_sequences": "num_return_sequences_in_group overwrites it, in ROLL too",
        "model_args.model_name_or_path": "the sampler has the trained weights; ROLL needs the path for the first moment only",
        "model_args.dtype": "the sampler computes in actor_train's precision",
        "worker_cls": "there is one kind of sampler per strategy",
        "infer_batch_size": "max_running_requests says how many sequences are decoded side by side",
    },
    config=SAMPLED,
    options="rollout.engine_options",
)  # fmt: skip

_UNUSED_STRATEGY = Literal[
    "vllm", "sglang", "hf_infer", "native", "megatron_train", "megatron_infer", "deepspeed_train", "deepspeed_infer",
    "fsdp2_train", "fsdp2_infer", "local",
] | None  # fmt: skip

VALIDATION = Role(
    section="validation",
    strategy=_UNUSED_STRATEGY,
    otherwise="validation uses actor_infer's engine and actor_train's settings",
    mapped={
        **_sampling("validation"),
        "generating_args.num_return_sequences": Here("validation.samples_per_prompt"),
        "data_args.file_name": by_rule("data.validation_files"),
    },
    planned=_SAMPLING_PLANNED,
    ignored={
        **COMMON,
        "data_args.template": "validation prompts use actor_train's template, in ROLL too",
        "data_args.prompt": "the columns are those of actor_train.data_args",
        "data_args.messages": "the columns are those of actor_train.data_args",
        "data_args.tag": "the columns are those of actor_train.data_args",
    },
    extra=(Base("eval_steps", int | None, None, "nothing: the eval_steps that counts stands at the top level"),),
)  # fmt: skip


def _environments(section: str, role: str) -> Role:
    return Role(
        section=section,
        strategy=_UNUSED_STRATEGY,
        otherwise="environments are no model: they have no devices and no batches of their own",
        mapped={
            **_sampling(role),
            "generating_args.max_new_tokens": by_rule(f"{role}.max_response_tokens", "per turn"),
        },
        planned=_SAMPLING_PLANNED,
        ignored={
            **{name: reason for name, reason in COMMON.items() if name != "generating_args.max_new_tokens"},
            "generating_args.num_return_sequences": "group_size says how many trajectories begin alike, in ROLL too",
        },
    )


TRAIN_ENVS = _environments("train_env_manager", "rollout")
VAL_ENVS = _environments("val_env_manager", "validation")
REWARD_MODEL = Role(
    section="reward_model",
    strategy=_UNUSED_STRATEGY,
    otherwise="a setting of the cluster of the judge, which is planned",
    planned={
        "device_mapping": ("a model that judges responses", ()),
        "strategy_args.strategy_name": ("a model that judges responses", ()),
        "model_args.model_name_or_path": ("a model that judges responses", ()),
    },
)
REWARD = Role(
    section="rewards.*",
    strategy=_UNUSED_STRATEGY,
    otherwise="a reward here is a function: it has no devices, model or batch of its own",
    ignored={
        "world_size": "responses are scored one after the other",
        "model_args.model_name_or_path": "rule rewards of ROLL take only the tokenizer from it; here responses are texts",
    },
)  # fmt: skip

ROWS: tuple[Key, ...] = tuple(
    row
    for role in (ACTOR_TRAIN, ACTOR_INFER, CRITIC, REFERENCE, VALIDATION, TRAIN_ENVS, VAL_ENVS, REWARD_MODEL, REWARD)
    for row in rows(role)
)
