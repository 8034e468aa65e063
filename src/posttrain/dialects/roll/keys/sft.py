"""Keys of ROLL's SFT pipeline: what it has at the top level, and its worker sft_train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned
from posttrain.dialects.roll.keys.pipeline import ROWS as PIPELINE
from posttrain.dialects.roll.keys.role import Here, Role, by_rule, rows
from posttrain.dialects.roll.keys.roles import COMMON, FREEZE, SAVING, TRAINED_PLANNED, lora, parallel, updates
from posttrain.dialects.roll.keys.strategy import TRAINED

SECTION = "sft_train"
# What all pipelines have, and means the same here.
_SHARED = (
    "exp_name", "seed", "output_dir", "base_dir", "logging_dir", "track_with", "tracker_kwargs.project", "tracker_kwargs.**",
    "save_steps", "max_ckpt_to_keep", "resume_from_checkpoint", "checkpoint_config.output_dir", "checkpoint_config.type",
    "checkpoint_config.async_upload", "checkpoint_config", "profiler_timeline", "profiler_memory", "profiler_output_dir",
    "system_envs", "rpc_timeout", "num_gpus_per_node", "num_nodes", "model_download_type", "alive_check_interval", "local_rank",
)  # fmt: skip
_DEFAULTS = {"exp_name": "start_sft_pipeline"}

_TOP: tuple[Key, ...] = (
    *(replace(row, default=_DEFAULTS.get(row.name, row.default)) for row in PIPELINE if row.name in _SHARED),
    mapped("pretrain", str | None, None, "model.path", "model to start from", by_rule=True),
    mapped("sequence_length", int | None, None, "data.max_tokens", "longest text, tokens", by_rule=True,
           note="ROLL pads all texts to it and stops at a longer one; so does a run here, which pads nothing."),
    mapped("max_steps", int, -1, "run.total_steps", "steps of the run; -1: num_train_epochs counts", by_rule=True),
    mapped("eval_steps", int, 10, "validation.every_steps validation.before_training validation.after_training",
           "validate before every so many steps, the first included", by_rule=True,
           change="the starting weights are validated, the last ones are not"),
    mapped("max_grad_norm", float, 1.0, "policy.optimizer.max_grad_norm", "clip gradient norms to this", by_rule=True,
           change="0: null"),
    mapped("global_template", str | None, None, "data.chat_template_options", "chat template, before that of data_args",
           by_rule=True),
    mapped("prompt_key", str, "instruction", "data.prompt_column", "column with the prompt, which becomes a user message"),
    mapped("response_key", str, "output", "data.response_column", "column with the response"),
    planned("query_key", str | None, None, "prompts of two columns", "column with more of the prompt"),
    planned("system_key", str | None, None, "system messages in a column of their own (posttrain.data.messages_column reads "
            "whole conversations)", "column with the system message"),
    ignored("logging_steps", int, 1, "metrics are shown at every step", "show metrics every so many steps"),
    ignored("is_offload_states", bool, False, "nothing else needs the device", "offload the model after every call"),
    mapped("validation.data_args.file_name", str | list[str] | None, ABSENT, "data.validation_files", "held-out files",
           by_rule=True),
    ignored("validation.**", Any, ABSENT, "the loss on held-out rows is computed as in training", "worker of validation"),
)  # fmt: skip

_ROLE = Role(
    section=SECTION,
    strategy=Literal["megatron_train", "deepspeed_train", "fsdp2_train", "local"],
    always=True,
    otherwise="supervised fine-tuning neither samples nor judges",
    mapped={
        **parallel("policy"),
        **updates("policy"),
        **lora("policy"),
        **SAVING,
        "training_args.per_device_train_batch_size": by_rule(
            "policy.sequences_per_micro_batch_per_device data.sequences_per_step",
            "x gradient_accumulation_steps x data-parallel ranks = sequences per step",
        ),
        "training_args.gradient_accumulation_steps": by_rule(
            "data.sequences_per_step", "x per_device_train_batch_size x data-parallel ranks = sequences per step"
        ),
        "training_args.num_train_epochs": by_rule("run.total_epochs", "whole numbers"),
        "model_args.dtype": by_rule("model.compute_dtype", "bf16: bfloat16, fp32: float32; master weights are float32"),
        "model_args.disable_gradient_checkpointing": by_rule("model.gradient_checkpointing", "not"),
        "model_args.model_config_kwargs": Here("model.config_overrides"),
        FREEZE: by_rule("model.freeze_vision", "the vision tower: true; other modules are planned"),
        "data_args.template": by_rule("data.chat_template_options", "qwen3: enable_thinking true; native: nothing"),
        "data_args.file_name": by_rule("data.train_files"),
        "data_args.preprocessing_num_workers": Here("data.tokenize_workers", "null: 1", lambda value: value or 1),
    },
    planned={name: reason for name, reason in TRAINED_PLANNED.items() if name not in (FREEZE, "router_replay.mode")},
    ignored={
        **COMMON,
        "model_args.model_name_or_path": "pretrain goes before it, in ROLL too",
        "num_gpus_per_worker": "a training worker has one device, in ROLL too",
        "infer_batch_size": "held-out rows are read in micro-batches of the training's size",
        "router_replay.mode": "nothing is sampled, so there is no choice of experts to repeat",
    },
    config=TRAINED,
    options="policy.engine_options",
)  # fmt: skip

ROWS: tuple[Key, ...] = tuple(replace(row, entry="sft") for row in (*_TOP, *rows(_ROLE)))
