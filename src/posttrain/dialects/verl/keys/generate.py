"""Keys of generation.yaml."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, refused

_NEW: dict[str, Any] = {"since": "0.4"}


def _in_a_list(name: str) -> list[str]:
    return [name]


def _row(name: str, type: Any, default: Any, fields: str, meaning: str, **more: Any) -> Key:
    return mapped(name, type, default, fields, meaning, entry="generate", **more)


def _engine(name: str, type: Any, default: Any, meaning: str, **more: Any) -> Key:
    """A setting of the sampler that keeps its name and value."""
    return _row(f"rollout.{name}", type, default, f"rollout.engine_options.{name}", meaning, **more)


def _unread(name: str, type: Any, default: Any, meaning: str, **more: Any) -> Key:
    return ignored(name, type, default, "not used when generating", meaning, entry="generate", **more)


ROWS: tuple[Key, ...] = (
    _row(
        "trainer.nnodes",
        int,
        1,
        "placement.nodes placement.devices",
        "machines",
        by_rule=True,
        change="x n_gpus_per_node = devices",
    ),
    _row(
        "trainer.n_gpus_per_node",
        int,
        8,
        "placement.devices",
        "devices of each machine",
        by_rule=True,
        change="x nnodes = devices",
    ),
    _row(
        "trainer.device",
        Literal["cuda", "cpu"],
        "cuda",
        "placement.device",
        "kind of device",
        by_rule=True,
        change="not written: an accelerator when there is one",
        **_NEW,
    ),
    _row("data.path", str, "~/data/rlhf/math/test.parquet", "data.files", "file with the prompts", to=_in_a_list),
    _row("data.prompt_key", str, "prompt", "data.prompt_column", "column with the chat messages"),
    _row("data.n_samples", int, 5, "rollout.samples_per_prompt", "responses per prompt"),
    _row("data.output_path", str, "/opt/tiger/math_Qwen2-7B-Instruct.parquet", "output.file", "file that is written"),
    _row(
        "data.batch_size",
        int,
        128,
        "output.rows_per_part",
        "prompts at once",
        note="Here also the rows that are saved together, so that a run that was broken off goes on behind them.",
    ),
    _row("model.path", str, "~/models/Qwen2-7B-Instruct", "model.path", "folder or hub id of the model"),
    _row(
        "model.external_lib",
        list[str] | str | None,
        None,
        "model.external_modules",
        "Python modules imported before the model is loaded",
        to=lambda names: [names] if isinstance(names, str) else (names or []),
        change="one name: a list",
    ),
    _row("model.trust_remote_code", bool, ABSENT, "model.trust_remote_code", "let code from the model's folder run"),
    _row("rollout.name", Literal["vllm", "sglang", "hf", "native"], "vllm", "rollout.engine", "sampler"),
    _unread("rollout.mode", str, "sync", "sync or async", **_NEW),
    _row(
        "rollout.temperature",
        float,
        1.0,
        "rollout.temperature",
        "divides the logits; 0 is greedy and takes n_samples=1",
        by_rule=True,
    ),
    _row(
        "rollout.top_k",
        int,
        50,
        "rollout.top_k",
        "keep the k most likely tokens",
        to=lambda count: max(count, 0),
        change="-1: 0",
    ),
    _row("rollout.top_p", float, 0.7, "rollout.top_p", "keep the most likely tokens up to this probability"),
    _row(
        "rollout.prompt_length",
        int,
        1536,
        "data.max_prompt_tokens",
        "longest prompt, tokens; longer ones are cut",
        note="verl cuts their end off without a word; so does this (data.overlong_prompts=truncate_right), and tells how many.",
    ),
    _row("rollout.response_length", int, 512, "rollout.max_response_tokens", "longest response, tokens"),
    _row(
        "rollout.dtype",
        Literal["bfloat16", "bf16", "float32", "fp32", "float16", "fp16", "half"],
        "bfloat16",
        "model.compute_dtype",
        "precision of the sampler",
        by_rule=True,
        change="bf16: bfloat16, fp32: float32; float16 is refused",
    ),
    _engine("gpu_memory_utilization", float, 0.5, "share of device memory for the sampler"),
    _row("rollout.ignore_eos", bool, False, "rollout.ignore_eos", "go on after the end token"),
    _engine("enforce_eager", bool, True, "no CUDA graphs"),
    _engine("free_cache_engine", bool, True, "release the sampler's memory"),
    _engine("load_format", str, "dummy_dtensor", "how the sampler gets its weights"),
    _row(
        "rollout.tensor_model_parallel_size",
        int,
        1,
        "rollout.tensor_parallel",
        "devices that share one copy of the sampler",
    ),
    _engine("max_num_batched_tokens", int, 8192, "tokens in one pass"),
    _engine("max_model_len", int | None, None, "longest prompt and response together", **_NEW),
    _engine("max_num_seqs", int, 1024, "sequences side by side"),
    _unread("rollout.log_prob_micro_batch_size", int | None, None, "sequences per pass of log-probs"),
    _unread("rollout.log_prob_micro_batch_size_per_gpu", int | None, 8, "sequences per pass of log-probs and device"),
    _row(
        "rollout.do_sample",
        bool,
        True,
        "rollout.temperature",
        "sample; false takes the most likely token",
        by_rule=True,
        change="false: temperature 0",
    ),
    _engine("disable_log_stats", bool, True, "no statistics in the log"),
    _engine("enable_chunked_prefill", bool, True, "prefill in pieces"),
    refused(
        "rollout.n",
        int,
        1,
        "the responses per prompt are data.n_samples",
        "responses per prompt and pass",
        entry="generate",
    ),
    _unread("rollout.calculate_log_probs", bool, False, "keep log-probs", **_NEW),
    _unread("actor.strategy", str, "fsdp", "training engine"),
    _unread("actor.ulysses_sequence_parallel_size", int, 1, "devices that share a sequence"),
    _unread("actor.fsdp_config.**", Any, ABSENT, "sharding"),
    _unread("ray_init.num_cpus", int | None, None, "CPUs of Ray", **_NEW),
    _unread("ray_init.timeline_json_file", str | None, None, "Ray's timeline", **_NEW),
)
