"""The keys that every ROLL worker section has (WorkerConfig), without strategy_config. What each of them becomes depends on
the section, and stands in roles.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT

FIRST = "2025-05"  # the state its guide of mid-2025 describes
LATEST = "2026-08"

Files = str | list[str] | None
Schedule = Literal[
    "linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay"
]  # Hugging Face's names


@dataclass(frozen=True, slots=True)
class Base:
    """A key below a worker section, whichever section that is."""

    name: str  # dotted, below the section
    type: Any
    default: Any
    meaning: str
    earlier: Mapping[str, Any] = field(default_factory=dict)
    since: str = ""
    until: str = ""
    note: str = ""


WORKER: tuple[Base, ...] = (
    Base("name", str | None, None, "name of the worker, set by the pipeline"),
    Base("worker_cls", str | None, None, "dotted path of the worker's class; null: the one of the section"),
    Base("pg_variant", Literal["vanilla", "ppo", "tis", "topr", "cispo", "kimi15"] | None, None,
         "policy loss of the PG worker classes; null: vanilla", since=LATEST),
    Base("topr_positive_weight", float, 1.0, "topr: weight of samples with a score above 0", since=LATEST),
    Base("topr_negative_weight", float, 1.0, "topr: weight of the others", since=LATEST),
    Base("tis_lower_bound", float, 0.0, "tis: the ratio is clipped below at this", since=LATEST,
         note="ROLL drops what is written here and uses the default; here it counts."),
    Base("tis_upper_bound", float, 1.0, "tis: the ratio is clipped above at this", since=LATEST,
         note="ROLL drops what is written here and uses the default; here it counts."),
    Base("cispo_epsilon_low", float, 0.1, "cispo: the ratio is clipped below at 1 - this", since=LATEST,
         note="ROLL drops what is written here and uses the default; here it counts."),
    Base("cispo_epsilon_high", float, 0.1, "cispo: the ratio is clipped above at 1 + this", since=LATEST,
         note="ROLL drops what is written here and uses the default; here it counts."),
    Base("cispo_use_unified_mask", bool, False, "cispo: tokens whose ratio left the range on the wrong side count nothing",
         since=LATEST),
    Base("kimi15_tau", float, 0.1, "kimi15: weight of the squared log-ratio, halved", since=LATEST,
         note="ROLL drops what is written here and uses the default; here it counts."),
    Base("device_mapping", str | list[int] | None, None,
         "global device ids, as a Python expression (list(range(0,8))) or a list; null: a CPU worker",
         note="ROLL runs the text as code and fails on a list; here ranges, lists and + are read, and nothing is run."),
    Base("num_gpus_per_worker", int, 1, "devices of one worker"),
    Base("world_size", int | None, None, "processes of a CPU worker"),
    Base("infer_batch_size", int, 16, "sequences per forward pass without gradient, per data-parallel rank"),
    Base("model_update_frequency", int, 1, "the sampler gets new weights every so many steps"),
    Base("backend_timeout", int, 30, "minutes until torch.distributed gives up"),
    Base("system_envs", dict, {}, "environment variables of the worker"),
    Base("max_concurrency", int, 1, "calls that a Ray actor takes at a time"),
    Base("use_dynamic_batching_in_train", bool, False, "cut training micro-batches by tokens", since=LATEST),
    Base("max_tokens_per_microbatch_in_train", int, 0, "tokens of such a micro-batch", since=LATEST),
    Base("sequence_length_round_in_train", int, 4, "lengths are padded to a multiple of this", since=LATEST),
    Base("use_dynamic_batching_in_infer", bool, False, "cut micro-batches of log-probs and values by tokens", since=LATEST),
    Base("max_tokens_per_microbatch_in_infer", int | None, None, "tokens of such a micro-batch", since=LATEST),
    Base("sequence_length_round_in_infer", int, 4, "lengths are padded to a multiple of this", since=LATEST),
    Base("use_sequence_packing", bool, False, "pack sequences instead of padding them (Megatron)", since=LATEST),
    Base("sequence_packing_args.**", Any, ABSENT, "how sequences are packed", since=LATEST),
    Base("logits_in_fp32", bool, False, "compute logits in float32", since=LATEST),
    Base("router_replay.mode", Literal["disable", "R2", "R3"], "disable", "replay the expert choices of the sampler",
         since=LATEST, note="R2 is not implemented in ROLL either."),
    Base("apply_loss_scale", bool, True, "undo the mean over micro-batches and devices", since=LATEST),
    Base("mtp_training_mode", Literal["disabled", "standalone", "joint"], "disabled", "train heads for several tokens ahead",
         since=LATEST),
    Base("offload_nccl", bool, False, "release communicators while the worker rests", since=LATEST),
    Base("opd_kl_coef", float | None, None, "weight of this teacher in on-policy distillation", since=LATEST),
    Base("checkpoint_config", dict | None, None, "copied in from the top level", note="Set by the pipeline."),
)  # fmt: skip

MODEL: tuple[Base, ...] = (
    Base("model_args.model_name_or_path", str | None, None, "folder or hub id of the model; null: pretrain"),
    Base("model_args.dtype", Literal["bf16", "fp32", "fp16"] | None, "bf16", "precision; null: the checkpoint's"),
    Base("model_args.attn_implementation", Literal["sdpa", "fa2", "auto"] | None, None, "attention kernel"),
    Base("model_args.flash_attn", str | None, None, "nothing: never a field of ROLL, though most of its files write it"),
    Base("model_args.disable_gradient_checkpointing", bool, False, "keep activations instead of recomputing them",
         note="ROLL reads it with DeepSpeed and FSDP2; Megatron goes by recompute_granularity. So do we."),
    Base("model_args.gradient_checkpointing_use_reentrant", bool | None, None, "the older way of recomputing", since=LATEST),
    Base("model_args.model_type",
         Literal["auto_sequence_classification", "auto_token_classification", "trl"] | None, None,
         "class of the model; null: a causal language model"),
    Base("model_args.num_labels", int, 1, "outputs of a classification model"),
    Base("model_args.model_config_kwargs", dict, {}, "fields of the model's config.json to set to other values"),
    Base("model_args.freeze_module_prefix", str | list[str] | None, None, "modules that are not trained", since=LATEST),
    Base("model_args.moe_aux_loss_coef", float | None, None, "weight of the balance loss of experts"),
    Base("model_args.device_map", str | dict | None, "balanced", "placement of layers (hf_infer)"),
    Base("model_args.ulysses_size", int, 1, "devices that share a sequence (FSDP2)", since=LATEST),
    Base("model_args.lora_target", str | list[str] | None, None, "modules that get LoRA adapters: all, a list, or a regular "
         "expression"),
    Base("model_args.lora_rank", int | None, 8, "rank of the adapters"),
    Base("model_args.lora_alpha", int | None, None, "scale of the adapters; null: twice the rank"),
    Base("model_args.lora_dropout", float, 0.0, "dropout of the adapters"),
    Base("model_args.additional_target", str | list[str] | None, None, "modules trained in full beside the adapters"),
    Base("model_args.adapter_name_or_path", str | None, None, "adapters to start from"),
)  # fmt: skip

TRAINING: tuple[Base, ...] = (
    Base("training_args.learning_rate", float, 5e-5, "peak learning rate"),
    Base("training_args.lr_scheduler_type", Schedule, "linear", "shape of the learning rate after warm-up",
         note="DeepSpeed in mid-2025 took cosine whatever was written; here what is written counts."),
    Base("training_args.weight_decay", float, 0.0, "decoupled weight decay"),
    Base("training_args.adam_beta1", float, 0.9, "decay rate of AdamW's first average"),
    Base("training_args.adam_beta2", float, 0.999, "decay rate of AdamW's second average"),
    Base("training_args.gradient_accumulation_steps", int, 1, "micro-batches per optimizer step"),
    Base("training_args.per_device_train_batch_size", int, 8, "sequences per micro-batch and data-parallel rank"),
    Base("training_args.warmup_steps", int, 0, "optimizer steps of linear warm-up; above 0 it goes before warmup_ratio"),
    Base("training_args.warmup_ratio", float, 0.0, "warm-up as a share of all optimizer steps", earlier={FIRST: 0.03}),
    Base("training_args.num_train_epochs", int | float, 1, "passes over the data; RLVR goes by max_steps"),
    Base("training_args.max_steps", int, -1, "set by the pipeline"),
    Base("training_args.save_hf_model", bool, False, "save a Hugging Face folder with every checkpoint"),
    Base("training_args.seed", int, 42, "set by the pipeline"),
    Base("training_args.data_seed", int | None, None, "set by the pipeline"),
    Base("training_args.dataloader_num_workers", int, 0, "processes that load data"),
    Base("training_args.bf16", bool, False, "follows model_args.dtype"),
    Base("training_args.fp16", bool, False, "follows model_args.dtype"),
    Base("training_args.tf32", bool | None, None, "tensor-core float32 products"),
    Base("training_args.output_dir", str | None, None, "set by the pipeline"),
    Base("training_args.logging_dir", str | None, None, "set by the pipeline"),
)  # fmt: skip

DATA: tuple[Base, ...] = (
    Base("data_args.template", str, "native", "chat template of the prompts"),
    Base("data_args.file_name", Files, None, "data files: one or a list",
         note="ROLL of mid-2025 wants a list here although its guide writes a text; both are read."),
    Base("data_args.eval_file_name", Files, None, "evaluation files of SFT and DPO"),
    Base("data_args.dataset_dir", str | None, None, "nothing: paths start at the current folder"),
    Base("data_args.dataset_type", str, "json", "odps and ailake are services; otherwise the file's ending decides",
         since=LATEST),
    Base("data_args.prompt", str | None, None, "column with the prompt as a text",
         note="ROLL tokenizes this text as it is, without the chat template; here it becomes one user message in it. In "
         "mid-2025 RLVR read the columns messages and prompt whatever was written."),
    Base("data_args.messages", str | None, None, "column with the prompt as chat messages; not together with prompt",
         note="With neither of the two, ROLL fails; here the column prompt or messages that the file has is taken."),
    Base("data_args.response", str | None, "solution", "column with a worked solution, for information"),
    Base("data_args.tag", str | None, "tag", "column with the name of the task",
         note="ROLL routes rows to rewards by the column tag in any case; here by the column named."),
    Base("data_args.id", str | None, "id", "column with the row's name"),
    Base("data_args.domain_interleave_probs", dict | None, None, "shares of the domains in a step: {domain: share}"),
    Base("data_args.interleave_probs", str | float | list[float] | None, None, "nothing: ROLL does not read it"),
    Base("data_args.preprocessing_num_workers", int | None, None, "processes that tokenize the data"),
    Base("data_args.image_folder", str | None, None, "folder of images", since=LATEST),
    Base("data_args.video_folder", str | None, None, "folder of videos", since=LATEST),
    Base("data_args.audio_folder", str | None, None, "folder of audio files", since=LATEST),
    Base("data_args.custom_data_kwargs_func", str | None, None, "function that reads images and the like", since=LATEST),
)  # fmt: skip

GENERATING: tuple[Base, ...] = (
    Base("generating_args.do_sample", bool, True, "sample instead of taking the likeliest token",
         note="ROLL's vLLM and SGLang do not read it."),
    Base("generating_args.temperature", float, 0.95, "divides the logits",
         note="ROLL samples with it and computes log-probs for training at temperature 1; here both use it."),
    Base("generating_args.top_p", float, 0.7, "keep the likeliest tokens up to this probability"),
    Base("generating_args.top_k", int, 50, "keep so many of the likeliest tokens; 0 or -1: all"),
    Base("generating_args.num_beams", int, 1, "beams of beam search"),
    Base("generating_args.max_length", int, 8192, "longest prompt and response together", earlier={FIRST: 512}),
    Base("generating_args.max_new_tokens", int | None, 8192, "longest response", earlier={FIRST: 512},
         note="ROLL overwrites it by sequence_length - prompt_length since 2025-06; here too."),
    Base("generating_args.repetition_penalty", float, 1.0, "divides the logits of tokens that occurred"),
    Base("generating_args.length_penalty", float, 1.0, "read by beam search"),
    Base("generating_args.num_return_sequences", int, 1, "responses per prompt"),
    Base("generating_args.stop_strings", list[str] | None, None, "texts that end a response"),
    Base("generating_args.include_stop_str_in_output", bool | None, None, "keep the stop text; null: yes", since=LATEST),
    Base("generating_args.logprobs", int | None, 0, "log-probs that the sampler reports per token", since=LATEST),
)  # fmt: skip

BLOCK: tuple[Base, ...] = (*WORKER, *MODEL, *TRAINING, *DATA, *GENERATING)
