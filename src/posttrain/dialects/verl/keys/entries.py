"""Keys of sft_trainer.yaml, evaluation.yaml and generation.yaml."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, planned

_SFT = "supervised fine-tuning"
_EVALUATE = "scoring responses that are in a file"
_GENERATE = "writing responses to a file"


def _rows(entry: str, waits_for: str, *keys: tuple[Any, ...]) -> tuple[Key, ...]:
    """(key, type, default, meaning) or (key, type, default, meaning, {more}) -> planned rows of an entry point."""
    return tuple(
        planned(name, type, default, waits_for, meaning, entry=entry, **(more[0] if more else {}))
        for name, type, default, meaning, *more in keys
    )


_NEW: dict[str, Any] = {"since": "0.4"}
_LATER: dict[str, Any] = {"since": "later"}
_STRATEGY = Literal["fsdp", "fsdp2"]

_SFT_ROWS = _rows(
    "sft",
    _SFT,
    ("data.train_batch_size", int, 256, "sequences per update, on all devices together"),
    ("data.micro_batch_size", int | None, None, "not read by verl"),
    ("data.micro_batch_size_per_gpu", int, 4, "sequences per forward and backward pass on one device"),
    ("data.train_files", list[str] | str, "~/data/gsm8k/train.parquet", "training files"),
    ("data.val_files", list[str] | str, "~/data/gsm8k/test.parquet", "validation files"),
    ("data.prompt_key", list[str] | str, "question", "column with the prompt"),
    ("data.response_key", list[str] | str, "answer", "column with the response"),
    ("data.prompt_dict_keys", list[str] | None, None, "names to follow inside that column"),
    ("data.response_dict_keys", list[str] | None, None, "the same for the response"),
    ("data.multiturn.enable", bool, False, "rows hold whole conversations", _NEW),
    ("data.multiturn.messages_key", str, "messages", "column with the conversation", _NEW),
    ("data.multiturn.tools_key", str, "tools", "column with the tools", _NEW),
    ("data.multiturn.enable_thinking_key", str, "enable_thinking", "column that switches thinking on", _NEW),
    ("data.max_length", int, 1024, "longest sequence, tokens"),
    ("data.truncation", Literal["error", "left", "right"], "error", "what happens to longer ones"),
    ("data.balance_dp_token", bool, False, "weigh devices by their tokens"),
    ("data.chat_template", str | None, None, "not read by verl, which stops at any value"),
    ("data.custom_cls.path", str | None, None, "file with a dataset class", _NEW),
    ("data.custom_cls.name", str | None, None, "name of that class", _NEW),
    ("data.use_shm", bool, False, "copy files to /dev/shm", _NEW),
    ("model.partial_pretrain", str, "~/models/gemma-1.1-7b-it", "folder or hub id of the starting weights"),
    ("model.use_shm", bool, False, "copy weights to /dev/shm", _NEW),
    (
        "model.fsdp_config.model_dtype",
        Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"],
        "fp32",
        "precision of the master weights",
        _NEW,
    ),
    ("model.fsdp_config.wrap_policy.min_num_params", int, 0, "shard modules of at least so many parameters"),
    ("model.fsdp_config.wrap_policy.**", Any, ABSENT, "other ways to choose what is sharded"),
    ("model.fsdp_config.cpu_offload", bool, False, "keep the model on the CPU"),
    ("model.fsdp_config.offload_params", bool, False, "parameters too"),
    ("model.external_lib", list[str] | str | None, None, "Python modules imported before the model is loaded"),
    (
        "model.enable_gradient_checkpointing",
        bool,
        True,
        "recompute activations",
        {"earlier": {"0.2": False}, "note": "verl's page shows False; the file of 0.4 says True."},
    ),
    ("model.trust_remote_code", bool, False, "let code from the model's folder run"),
    ("model.lora_rank", int, 0, "LoRA: rank of the adapters; 0 trains all weights"),
    ("model.lora_alpha", int | float, 16, "LoRA: scale of the adapters"),
    ("model.target_modules", list[str] | str, "all-linear", "LoRA: modules that get an adapter"),
    ("model.use_liger", bool, False, "Liger kernels"),
    ("model.strategy", _STRATEGY, "fsdp2", "training engine", {"since": "0.4"}),
    ("ulysses_sequence_parallel_size", int, 1, "devices that share a sequence"),
    ("use_remove_padding", bool, False, "pack sequences; must be true with sequence parallelism"),
    ("optim.lr", float, 1e-5, "peak learning rate"),
    ("optim.betas", list[float], [0.9, 0.95], "decay rates of AdamW's two averages"),
    ("optim.weight_decay", float, 0.01, "decoupled weight decay"),
    ("optim.warmup_steps_ratio", float, 0.1, "warm-up as a share of the run"),
    ("optim.clip_grad", float, 1.0, "clip the global gradient norm to this"),
    ("optim.lr_scheduler", Literal["cosine", "wsd"], "cosine", "shape of the learning rate", _NEW),
    ("trainer.default_local_dir", str, "/tmp/sft_model", "folder of the checkpoints"),
    ("trainer.default_hdfs_dir", str | None, "hdfs://tmp/experiments/gsm8k/gemma-1.1-7b-it/", "remote folder"),
    ("trainer.resume_path", str | None, None, "not read by verl"),
    ("trainer.project_name", str, "gsm8k-sft", "project in the trackers"),
    ("trainer.experiment_name", str, "test", "name of the run"),
    ("trainer.total_epochs", int, 4, "passes over the data"),
    ("trainer.total_training_steps", int | None, None, "stop after so many updates"),
    ("trainer.logger", list[str] | str, ["console"], "trackers", {"note": "Was the text console in some versions."}),
    ("trainer.seed", int, 1, "seed of the data order"),
    ("trainer.save_freq", int, -1, "updates between checkpoints; -1: the last only", _NEW),
    ("trainer.test_freq", int, -1, "updates between validations; -1: the last only", _NEW),
    ("trainer.nnodes", int, 1, "machines", _NEW),
    ("trainer.n_gpus_per_node", int, 8, "devices of each", _NEW),
    ("trainer.max_ckpt_to_keep", int | None, None, "newest checkpoints that are kept", _NEW),
    ("trainer.checkpoint.save_contents", list[str], ABSENT, "what is saved", _LATER),
    ("trainer.checkpoint.load_contents", list[str], ABSENT, "what is restored", _LATER),
    ("trainer.resume_mode", str, ABSENT, "auto, disable or resume_path", _LATER),
    ("trainer.resume_from_path", str | None, ABSENT, "checkpoint to go on from", _LATER),
    ("trainer.device", str, ABSENT, "kind of device", _LATER),
)

_EVALUATE_ROWS = _rows(
    "evaluate",
    _EVALUATE,
    ("data.path", str, "/tmp/math_Qwen2-7B-Instruct.parquet", "file with the responses"),
    ("data.prompt_key", str, "prompt", "column with the prompt"),
    ("data.response_key", str, "responses", "column with the responses, a list of texts"),
    ("data.data_source_key", str, "data_source", "column that splits the numbers"),
    ("data.reward_model_key", str, "reward_model", "column with the ground truth"),
    (
        "custom_reward_function.path",
        str | None,
        None,
        "Python file with the scorer",
        {"since": "0.4", "note": "verl's page says built-in scorers are used without it; its code fails."},
    ),
    ("custom_reward_function.name", str, "compute_score", "name of the function in that file", _NEW),
    ("custom_reward_function.reward_kwargs.**", Any, ABSENT, "further arguments of the function", _NEW),
    ("ray_init.num_cpus", int | None, None, "CPUs of Ray", _NEW),
)

_GENERATE_ROWS = _rows(
    "generate",
    _GENERATE,
    ("trainer.nnodes", int, 1, "machines"),
    ("trainer.n_gpus_per_node", int, 8, "devices of each"),
    ("trainer.device", str, "cuda", "kind of device", _NEW),
    ("data.path", str, "~/data/rlhf/math/test.parquet", "file with the prompts"),
    ("data.prompt_key", str, "prompt", "column with the chat messages"),
    ("data.n_samples", int, 5, "responses per prompt"),
    ("data.output_path", str, "/opt/tiger/math_Qwen2-7B-Instruct.parquet", "file that is written"),
    ("data.batch_size", int, 128, "prompts at once"),
    ("model.path", str, "~/models/Qwen2-7B-Instruct", "folder or hub id of the model"),
    ("model.external_lib", list[str] | str | None, None, "Python modules imported before the model is loaded"),
    ("model.trust_remote_code", bool, ABSENT, "let code from the model's folder run"),
    ("rollout.name", Literal["vllm", "sglang", "hf", "native"], "vllm", "sampler"),
    ("rollout.mode", str, "sync", "sync or async", _NEW),
    ("rollout.temperature", float, 1.0, "divides the logits; 0 is greedy and takes n_samples=1"),
    ("rollout.top_k", int, 50, "keep the k most likely tokens"),
    ("rollout.top_p", float, 0.7, "keep the most likely tokens up to this probability"),
    ("rollout.prompt_length", int, 1536, "longest prompt, tokens; longer ones are cut"),
    ("rollout.response_length", int, 512, "longest response, tokens"),
    ("rollout.dtype", str, "bfloat16", "precision of the sampler"),
    ("rollout.gpu_memory_utilization", float, 0.5, "share of device memory for the sampler"),
    ("rollout.ignore_eos", bool, False, "go on after the end token"),
    ("rollout.enforce_eager", bool, True, "no CUDA graphs"),
    ("rollout.free_cache_engine", bool, True, "release the sampler's memory"),
    ("rollout.load_format", str, "dummy_dtensor", "how the sampler gets its weights"),
    ("rollout.tensor_model_parallel_size", int, 1, "devices that share one copy of the sampler"),
    ("rollout.max_num_batched_tokens", int, 8192, "tokens in one pass"),
    ("rollout.max_model_len", int | None, None, "longest prompt and response together", _NEW),
    ("rollout.max_num_seqs", int, 1024, "sequences side by side"),
    ("rollout.log_prob_micro_batch_size", int | None, None, "not used when generating"),
    ("rollout.log_prob_micro_batch_size_per_gpu", int | None, 8, "not used when generating"),
    ("rollout.do_sample", bool, True, "sample"),
    ("rollout.disable_log_stats", bool, True, "no statistics in the log"),
    ("rollout.enable_chunked_prefill", bool, True, "prefill in pieces"),
    ("rollout.n", int, 1, "responses per prompt and pass"),
    ("rollout.calculate_log_probs", bool, False, "keep log-probs", _NEW),
    ("actor.strategy", str, "fsdp", "not used when generating"),
    ("actor.ulysses_sequence_parallel_size", int, 1, "not used when generating"),
    ("actor.fsdp_config.**", Any, ABSENT, "not used when generating"),
    ("ray_init.num_cpus", int | None, None, "CPUs of Ray", _NEW),
    ("ray_init.timeline_json_file", str | None, None, "Ray's timeline", _NEW),
)

ROWS: tuple[Key, ...] = (*_SFT_ROWS, *_EVALUATE_ROWS, *_GENERATE_ROWS)
