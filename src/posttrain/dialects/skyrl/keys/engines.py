"""Keys of generator about the sampler itself: engine, replicas, weight transfer."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned, refused

_A = "2025-08"
_ENDPOINT = "the sampler as an HTTP endpoint for agents"


def _option(name: str, type: Any, default: Any, meaning: str, **more: Any) -> Key:
    """An option that the sampler reads in its own words."""
    return mapped(f"generator.{name}", type, default, f"rollout.engine_options.{name}", meaning, **more)


ROWS: tuple[Key, ...] = (
    mapped(
        "generator.backend",
        Literal["vllm", "sglang", "hf", "native"],
        "vllm",
        "rollout.engine",
        "sampler: vllm, sglang, or this program's own: native, hf",
    ),
    mapped(
        "generator.run_engines_locally",
        bool,
        True,
        "rollout.endpoints",
        "false: samplers run elsewhere, at remote_inference_engine_urls",
        by_rule=True,
        change="false: the servers at these addresses; true: none",
    ),
    mapped(
        "generator.num_inference_engines",
        int,
        1,
        "rollout.devices placement.devices",
        "copies of the sampler",
        by_rule=True,
        change="copies x devices of a copy = devices; native beside the policy: a copy on each",
    ),
    mapped(
        "generator.inference_engine_tensor_parallel_size",
        int,
        4,
        "rollout.tensor_parallel",
        "devices that share a copy of the sampler's matrices",
        by_rule=True,
        change="native: 1",
    ),
    _option("inference_engine_pipeline_parallel_size", int, 1, "devices that share its layers", since="later"),
    _option("inference_engine_data_parallel_size", int, 1, "copies that share experts", since="later"),
    _option("inference_engine_expert_parallel_size", int, 1, "devices that share its experts", since="later"),
    _option("model_dtype", Literal["bfloat16", "float16", "float32"], "bfloat16", "precision of the sampler's weights"),
    _option(
        "weight_sync_backend",
        Literal["nccl", "gloo"],
        "nccl",
        "how weights get to the sampler",
    ),
    _option("weight_transfer_threshold_cuda_ipc_GB", int | float, 1.0, "GiB sent at a time", since=_A),
    ignored(
        "generator.async_engine",
        bool,
        True,
        "one sampler serves both kinds of calls here",
        "vLLM's asynchronous engine instead of the offline one; false needs generator.batched",
    ),
    _option("vllm_v1_disable_multiproc", bool, True, "vLLM schedules in one process, so in the same order each time"),
    _option("enable_prefix_caching", bool, True, "keep the cache of shared prompt beginnings"),
    _option(
        "enable_chunked_prefill",
        bool,
        True,
        "prefill long prompts in pieces",
        note="SkyRL declares it and never hands it to the engine.",
    ),
    mapped(
        "generator.max_num_batched_tokens",
        int,
        8192,
        "rollout.max_prefill_tokens",
        "tokens in one pass of the sampler",
    ),
    mapped(
        "generator.max_num_seqs",
        int,
        1024,
        "rollout.max_concurrent_sequences",
        "sequences decoded side by side",
    ),
    _option("enforce_eager", bool, False, "no CUDA graphs", note="true from October 2025, later false again."),
    _option("gpu_memory_utilization", float, 0.8, "share of a device's memory for the sampler"),
    mapped(
        "generator.remote_inference_engine_urls",
        list[str],
        ["127.0.0.1:8001"],
        "rollout.endpoints",
        "addresses of samplers that run elsewhere (host:port), one per engine",
        by_rule=True,
        change="http:// in front, where no scheme is written",
        note="Servers are this program's way to start vLLM or SGLang (docs/rollout.md), not SkyRL's vllm_server.",
    ),
    mapped(
        "generator.inference_engine.external_server_urls",
        list[str] | None,
        None,
        "rollout.endpoints",
        "addresses of servers that run elsewhere, whatever run_engines_locally says",
        by_rule=True,
        since="later",
    ),
    refused(
        "generator.inference_engine.external_proxy_url",
        str | None,
        None,
        "requests and weights go to the servers themselves; name them in generator.inference_engine.external_server_urls",
        "a router before servers that run elsewhere",
        since="later",
    ),
    ignored(
        "generator.override_existing_update_group",
        str | bool,
        "auto",
        "no process group of an earlier run is left: weights go through a folder, or by a group that every sync makes anew",
        "remote samplers: replace the process group of an earlier run (auto, enable, disable)",
    ),
    ignored(
        "generator.model_name",
        str | None,
        None,
        "the sampler serves one model",
        "name under which the model is served",
        since="later",
    ),
    planned("generator.enable_http_endpoint", bool, False, _ENDPOINT, "serve the sampler over HTTP", since="later"),
    ignored(
        "generator.http_endpoint_host",
        str,
        "127.0.0.1",
        "only enable_http_endpoint (planned) reads it",
        "address of that endpoint",
        since="later",
    ),
    ignored(
        "generator.http_endpoint_port",
        int,
        8000,
        "only enable_http_endpoint (planned) reads it",
        "port of that endpoint",
        since="later",
    ),
    mapped(
        "generator.engine_init_kwargs",
        dict,
        {},
        "rollout.engine_options",
        "further options for the sampler in its own words",
        by_rule=True,
        since="later",
    ),
    mapped(
        "generator.engine_init_kwargs.**",
        Any,
        ABSENT,
        "rollout.engine_options",
        "one further option for the sampler",
        by_rule=True,
        since="later",
    ),
    mapped(
        "generator.rope_scaling",
        dict | None,
        "${trainer.rope_scaling}",
        "model.config_overrides",
        "how rotary positions are stretched; the sampler has the trainer's",
        by_rule=True,
        since="later",
    ),
    mapped(
        "generator.rope_theta",
        int | float | None,
        "${trainer.rope_theta}",
        "model.config_overrides",
        "base of the rotary positions; the sampler has the trainer's",
        by_rule=True,
        since="later",
    ),
    ignored(
        "generator.fully_sharded_loras",
        bool,
        False,
        "trainer.policy.model.lora.rank is what turns LoRA on",
        "vLLM: shard LoRA matrices fully",
        since="later",
    ),
)
