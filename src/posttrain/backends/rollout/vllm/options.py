"""Translation of our settings and the dialects' options to vLLM's arguments."""

from __future__ import annotations

from typing import Any

from posttrain.backends.rollout.vllm.experts import OPTION
from posttrain.interfaces.rollout_engine import SamplerPlan

# Options about the sampler that are not arguments of vLLM's engine: ours, and those of dialects with effects elsewhere.
NOT_ARGUMENTS = (
    "python",
    "startup_timeout_s",
    "api_key_env",
    "free_cache_engine",
    "sleep_level",
    "layered_summon",
    "multi_stage_wake_up",
    "weight_sync_backend",
    "weight_transfer_threshold_cuda_ipc_GB",
    "override_existing_update_group",
    "remote_inference_engine_urls",
    "vllm_v1_disable_multiproc",
    "VLLM_USE_V1",
)
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # supported by vLLM 0.32
_RENAMED = {
    "model_dtype": "dtype",
    "inference_engine_pipeline_parallel_size": "pipeline_parallel_size",
    "inference_engine_data_parallel_size": "data_parallel_size",
}


def engine_arguments(plan: SamplerPlan) -> dict[str, Any]:
    """Return the arguments of vLLM's engine: engine_options unchanged, over those from the rest of the configuration.

    Log-probs are always those of the sampled distribution, and the model's own generation config is ignored.
    """
    arguments: dict[str, Any] = {
        "model": plan.model_path,
        "tokenizer": plan.tokenizer_path,
        "hf_overrides": dict(plan.config_overrides) or None,
        "dtype": plan.dtype,
        "seed": plan.seed,
        "trust_remote_code": plan.trust_remote_code,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_concurrent_sequences,
        "max_num_batched_tokens": max(plan.max_prefill_tokens, plan.max_concurrent_sequences),
        "tensor_parallel_size": plan.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enable_lora": True if plan.adapter_rank else None,
        "max_lora_rank": next((rank for rank in LORA_RANKS if rank >= plan.adapter_rank), None)
        if plan.adapter_rank
        else None,
        OPTION: True if plan.expert_layers else None,
        "mm_processor_kwargs": dict(plan.image_options) or None,
        "enable_sleep_mode": (frees_cache(plan) and plan.cuda) or None,
    }
    for name, value in plan.options.items():
        if name in NOT_ARGUMENTS or value is None:
            continue
        if name == "load_format":
            value = load_format(value)
            if value == "dummy" and plan.adapter_rank:
                continue  # the base weights are not sent: they must be read at the start
        elif name == "limit_images":
            name, value = "limit_mm_per_prompt", {"image": value}
        elif name == "disable_mm_preprocessor_cache":
            name, value = "mm_processor_cache_gb", 0 if value else None  # its name since vLLM 0.11
        elif name == "inference_engine_expert_parallel_size":
            name, value = "enable_expert_parallel", value > 1
        arguments[_RENAMED.get(name, name)] = value
    if not plan.cuda:
        # On a CPU, vLLM 0.32 crashes at a seeded request with a prompt prefilled in chunks ("CPU Generator does not use offset").
        arguments["enable_chunked_prefill"] = False
        whole_prompt = arguments["max_model_len"] or 0
        arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], whole_prompt)
    return {name: value for name, value in arguments.items() if value is not None}


def load_format(value: str) -> str:
    """Return the source of the server's first weights. verl names the format that its trainer sends, with dummy_ where the server
    begins with random weights: the first sync brings the real ones in either case."""
    if value.startswith("dummy"):
        return "dummy"
    return "auto" if value in ("hf", "dtensor", "megatron") else value


def frees_cache(plan: SamplerPlan) -> bool:
    """Return True when the sampler frees its memory while the trainer works."""
    return bool(plan.options.get("free_cache_engine", False))
