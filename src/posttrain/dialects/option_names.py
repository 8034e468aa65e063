"""Options below sections of any names, with their types: of libraries (vLLM, SGLang, Megatron, config.json) and of parts of verl.

They serve to notice misspellings and values of another type. A name that is not among them is no error: the libraries have others
in other versions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from posttrain.dialects.value_types import parse_type

# The end of a section's name -> the lists of option_names.json
_LISTS = {
    r"engine_kwargs\.vllm|vllm_config|vllm_kwargs": ("vllm",),
    r"(vllm|engine_kwargs|vllm_config|vllm_kwargs)\.compilation_config": ("vllm_compilation",),
    r"engine_kwargs\.sglang|sglang_config": ("sglang",),
    r"engine_init_kwargs": ("vllm", "sglang"),
    r"strategy_config": ("vllm", "sglang", "megatron", "verl_fsdp"),
    r"override_config|override_config\.model_config|model_config_kwargs|hf_overrides|config_overrides": (
        "model_config",
    ),
    r"override_transformer_config|transformer_config_kwargs|override_ddp_config|ddp_config|additional_configs": (
        "megatron",
    ),
    r"mcore_kwargs": ("megatron",),
    r"override_optimizer_config|optimizer_config_kwargs": ("optimizer",),
    r"ray_init": ("ray_init",),
    r"runtime_env": ("runtime_env",),
    r"chat_template_kwargs": ("chat_template",),
    r"sampling_params\.additional_kwargs": ("vllm_sampling",),
    r"(reward|reward_model)\.reward_kwargs": ("reward_manager",),
    r"mm_processor_kwargs": ("processor",),
    r"megatron|mindspeed": ("verl_megatron",),
    r"^engine": ("verl_megatron", "verl_fsdp"),
    r"mbridge_config": ("mbridge",),
    r"sequence_packing_args": ("sequence_packing",),
    r"megatron_config": ("skyrl_megatron", "megatron"),
    r"fsdp_config|fsdp": ("verl_fsdp",),
    r"torchtitan": ("verl_torchtitan",),
    r"veomni": ("verl_veomni",),
    r"automodel": ("verl_automodel",),
    r"wrap_policy": ("wrap_policy",),
    r"arctic_rl": ("arctic",),
    r"reward_model\.rollout": ("verl_rollout",),
    r"global_profiler|profiler": ("profiler",),
    r"global_tool_config|tool_config": ("profiler_tools",),
    r"tool_config\.nsys": ("nsys",),
    r"(controller|worker)_nsight_options": ("nsight",),
    r"tool_config\.(torch|npu)": ("torch_profiler",),
    r"tool_config\.torch\.schedule": ("torch_schedule",),
    r"tool_config\.torch_memory": ("torch_memory",),
    r"tool_config\.precision_debugger": ("precision_debugger",),
    r"npu_profile\.options": ("npu_profile",),
    r"qat": ("qat",),
    r"mtp": ("mtp",),
    r"model\.lora": ("verl_lora",),
    r"tiled_mlp": ("tiled_mlp",),
    r"rollout\.prometheus": ("prometheus",),
    r"rollout\.trace": ("trace",),
    r"rollout\.server": ("server",),
    r"checkpoint_engine": ("checkpoint_engine",),
    r"rollout\.disaggregation": ("disaggregation",),
    r"router_replay": ("router_replay",),
    r"fused_kernel_options": ("fused_kernel",),
    r"continuous_token": ("continuous_token",),
    r"transfer_queue|transfer_queue\.backend": ("transfer_queue",),
    r"transfer_queue\.metrics": ("transfer_metrics",),
    r"SimpleStorage": ("simple_storage",),
    r"MooncakeStore": ("mooncake",),
    r"v1\.(colocate|separate)_async": ("async_trainer",),
    r"v1\.sampler": ("v1_sampler",),
    r"ref\.optim": ("fsdp_optimizer",),
}
_ANY = "any"


@cache
def options_of(section: str) -> Mapping[str, str]:
    """The known options below a section, by the end of its name, with the texts of their types; none for another section. One
    that two libraries take as different types may be of either."""
    found: dict[str, str] = {}
    for ending, names in _LISTS.items():
        if re.search(rf"(^|[._])({ending})$", section):
            for option, type in (each for name in names for each in _options()[name].items()):
                found[option] = _either(found.get(option, type), type)
    return found


def _either(one: str, other: str) -> str:
    """The text of the type of what fits one type or the other."""
    parts = dict.fromkeys([*one.split(" | "), *other.split(" | ")])
    return (
        _ANY
        if _ANY in parts
        else " | ".join([*(part for part in parts if part != "null"), *(["null"] * ("null" in parts))])
    )


def type_of_option(key: str, value: object) -> object:
    """The type that a library's option has; any for another key, and for 0 and 1, which are truth values and numbers."""
    section, _, option = key.rpartition(".")
    return parse_type(_ANY if value in (0, 1) else options_of(section).get(option, _ANY))


@cache
def _options() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return found
