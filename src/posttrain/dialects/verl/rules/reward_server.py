"""A language model that verl serves for the user's reward function, which asks it at an address (generative reward models)."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get

_MODEL, _SERVED = "reward_model", "reward.reward_model"  # the section, and its later name
REWARD_MODELS = (_SERVED, _MODEL)
_FUNCTION = "custom_reward_function"
_OURS = "reward.served"
_ENGINES = ("vllm", "sglang")
# verl's own file
_SHARED_BY, _PROMPT, _ANSWER = 2, 2048, 2048
_OPTIONS = (
    *("gpu_memory_utilization", "enforce_eager", "load_format", "enable_chunked_prefill", "enable_prefix_caching"),
    *("quantization", "disable_log_stats"),
)
_SIZES = {"max_num_seqs": "max_concurrent_sequences", "max_num_batched_tokens": "max_prefill_tokens"}
_READ = (
    *(
        "_target_",
        "name",
        "tensor_model_parallel_size",
        "max_model_len",
        "prompt_length",
        "response_length",
        "engine_kwargs",
    ),
    *_OPTIONS,
    *_SIZES,
)


def enabled_section(keys: Reader) -> str | None:
    """The section of the reward model, by its later name or the first one; None where neither is enabled."""
    return next((at for at in REWARD_MODELS if get(keys, f"{at}.enable", False)), None)


def judge_section(keys: Reader) -> str | None:
    """The section of a reward model that a function of the user's asks; None where there is none, or where --here has no room for
    its server."""
    section = enabled_section(keys)
    asked = get(keys, f"{_FUNCTION}.path") or get(keys, f"reward.{_FUNCTION}.path")
    if section is None or not asked or keys.here:
        return None
    rollout = _rollout(keys, section)
    return section if rollout and rollout.get("name") in _ENGINES else None


def _rollout(keys: Reader, section: str) -> dict[str, Any]:
    """The settings of its server: below the section, or below the one of the other name, which verl's own file fills."""
    return keys.section(f"{section}.rollout") or keys.section(f"{_MODEL}.rollout")


def pool_of(keys: Reader, section: str) -> dict[str, Any] | None:
    """Return the section with its own devices, nnodes and n_gpus_per_node; None where it is on those of the trainer."""
    found = keys.section(section)
    return found if found.get("enable_resource_pool") else None


def judge_model(keys: Reader, section: str) -> str | None:
    """The folder or hub id of the model."""
    path = keys.section(section).get("model_path") or get(keys, f"{_MODEL}.model.path")
    return None if path is None else str(path)


def served_model(keys: Reader, section: str, devices: int) -> dict[str, Any]:
    """The model that the run serves. Args: devices, its own or those of the trainer."""
    rollout, place = _rollout(keys, section), f"{section}.rollout"
    path = judge_model(keys, section)
    if path is None:
        where = f"{section}.model_path" if section == _SERVED else f"{section}.model.path"
        keys.problem(
            "the model that the reward function asks has no path", key=f"{section}.enable", fix=f"give {where}"
        )
    size = rollout.get("tensor_model_parallel_size") or _SHARED_BY
    if devices % size:
        key = f"{place}.tensor_model_parallel_size"
        fits = next(count for count in range(min(size, devices), 0, -1) if devices % count == 0)
        what = f"{devices} device{'s do' if devices > 1 else ' does'} not split into servers of {size} devices each"
        keys.problem(what, key=key, fix=f"use {key}={fits}")
    longest = (rollout.get("prompt_length") or _PROMPT) + (rollout.get("response_length") or _ANSWER)
    options = {name: rollout[name] for name in _OPTIONS if rollout.get(name) is not None}
    extra = (rollout.get("engine_kwargs") or {}).get(rollout["name"]) or {}
    options |= {name: value for name, value in extra.items() if value is not None}
    keys.take_over(section)
    for name in rollout:
        if name not in _READ:
            keys.ignore(f"{place}.{name}", "the server for the reward function does not read it")
    fields = {
        f"{_OURS}.path": path or "",
        f"{_OURS}.engine": rollout["name"],
        f"{_OURS}.tensor_parallel": size,
        f"{_OURS}.max_tokens": rollout.get("max_model_len") or longest,
        f"{_OURS}.engine_options": options,
    }
    return fields | {f"{_OURS}.{ours}": rollout[name] for name, ours in _SIZES.items() if rollout.get(name)}
