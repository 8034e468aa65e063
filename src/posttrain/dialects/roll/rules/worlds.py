"""ROLL's environments that have another name here: WebShop, GEM's games, tasks and questions, and tools around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.dialects.reader import Reader

_QUESTIONS = {"roll_math": "math", "roll_qa": "text", "math": "math", "qa": "text", "logic": "text"}
_BOXED_NUMBER = r".*\\boxed\{\s*(\d+)\s*\}"
_TAGGED = r".*<answer>(.*?)</answer>"
# GEM's registered ranges: lowest and highest number, turns.
_GUESSES = {
    "game:GuessTheNumber-v0": (1, 20, 10),
    "game:GuessTheNumber-v0-easy": (1, 10, 4),
    "game:GuessTheNumber-v0-hard": (1, 50, 7),
}
# What the manager or the pipeline reads, and settings without a meaning here.
_ELSEWHERE = (
    "max_steps",
    "max_turns",
    "seed",
    "size",
    "mode",
    "observation_mode",
    "load_from_cache_file",
    "extract_boxed",
)
# Settings that come from tool_wrapper, and where they stand in it.
WRAPPED = {
    "tools": "tool_configs",
    "max_calls": "wrapper_args.max_tool_uses",
    "call_reward": "wrapper_args.tool_success_reward",
    "failed_call_reward": "wrapper_args.tool_reward",
}
_SHARED = {"format_penalty": "format_penalty", "action_pattern": "action_pattern", "env_instruction": "instruction"}


def world(keys: Reader, at: str, kind: str, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return our environment and its settings for one of ROLL's; None where there is none."""
    family, _, task = kind.partition(":")
    if kind == "webshop":
        return "shop", _shop(keys, at, config)
    if kind in _GUESSES:
        low, high, turns = _GUESSES[kind]
        settings = {"low": config.get("min_number", low), "high": config.get("max_number", high)}
        settings |= _own(keys, at, config, {**_SHARED, "min_number": "low", "max_number": "high"})
        return "guess_number", {"action_pattern": _BOXED_NUMBER, "max_turns": config.get("max_turns", turns)} | settings
    if family == "rg" and task:
        options = {name: value for name, value in config.items() if name not in (*_SHARED, *_ELSEWHERE)}
        shared = _own(keys, at, {name: value for name, value in config.items() if name in _SHARED}, _SHARED)
        return "reasoning_gym", {"task": task, **({"options": options} if options else {}), **shared}
    if family in _QUESTIONS:
        return "questions", _questions(keys, at, _QUESTIONS[family], config)
    return None


def _shop(keys: Reader, at: str, config: Mapping[str, Any]) -> dict[str, Any]:
    mode = config.get("observation_mode", "text")
    if mode != "text":
        keys.problem(f"{at}.env_config.observation_mode={mode} is not supported: pages are texts here",
                     key=f"{at}.env_config.observation_mode", fix="use text", refused=True)  # fmt: skip
    keys.warn(f"{at}: env_type=webshop is the environment shop, with WebShop's pages, actions and reward, and products and "
              "orders of this program's own")  # fmt: skip
    return _own(keys, at, config, {**_SHARED, "num_products": "products"})


def _questions(keys: Reader, at: str, grader: str, config: Mapping[str, Any]) -> dict[str, Any]:
    names = {**_SHARED, "dataset_name": "file", "question_key": "question_column", "answer_key": "answer_column"}
    settings = {"grader": grader, **_own(keys, at, config, {**names, "split": ""})}
    settings.pop("", None)
    if grader == "math":
        settings.setdefault("question_column", "problem")  # ROLL's default
    elif not config.get("extract_boxed", False):
        settings.setdefault("action_pattern", _TAGGED)
    if not settings.get("file"):
        keys.problem(f"{at}.env_config names no dataset", key=f"{at}.env_config", fix="use dataset_name: FILE")
        settings["file"] = "missing"
    return settings | _tools(keys, at)


def _tools(keys: Reader, at: str) -> dict[str, Any]:
    """Return the settings for tool_wrapper, whose tools the chat template offers here."""
    at = f"{at}.tool_wrapper"
    wrapper = _mapping(keys, keys[at], at)
    configs = wrapper.get("tool_configs") or []
    if not isinstance(configs, list):
        keys.problem(
            f"{at}.tool_configs is no list: {configs!r}", key=at, fix="write - {tool_id: ..., tool_args: {...}}"
        )
        return {}
    read = (_tool(keys, config, f"{at}.tool_configs.{index}") for index, config in enumerate(configs))
    found = [tool for tool in read if tool is not None]
    if not found:
        return {}
    rewards = _mapping(keys, wrapper.get("wrapper_args"), f"{at}.wrapper_args")
    used = _number(keys, rewards, "tool_reward", f"{at}.wrapper_args")
    return {
        "tools": found,
        "max_calls": rewards.get("max_tool_uses"),
        "call_reward": used + _number(keys, rewards, "tool_success_reward", f"{at}.wrapper_args"),
        "failed_call_reward": used,
    }


def _tool(keys: Reader, config: Any, at: str) -> dict[str, Any] | None:
    """Return one of our tools with its options, whose values ``plan`` checks; None where there is none."""
    tool = _mapping(keys, config, at)
    kind, options = tool.get("tool_id"), _mapping(keys, tool.get("tool_args"), f"{at}.tool_args")
    if kind == "python_code":
        return {"name": "python"} | _given(options, {"timeout": "timeout_s"})
    if kind == "search" and options.get("search_url"):
        return {"name": "retrieve", "url": options["search_url"]} | _given(options, {"topk": "results"})
    if kind == "mcp" and options.get("server_url"):
        return {"name": "mcp", "url": options["server_url"]}
    keys.problem(f"{at} has the tool_id {kind!r} with {', '.join(map(str, options)) or 'no tool_args'}", key=at,
                 fix="use python_code, search with a search_url, or mcp with a server_url")  # fmt: skip
    return None


def _given(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: options[theirs] for theirs, ours in names.items() if options.get(theirs) is not None}


def _mapping(keys: Reader, value: Any, at: str) -> Mapping[str, Any]:
    """Return a part that may be left out; one of another type is reported, and read as empty."""
    if isinstance(value, Mapping):
        return value
    if value is not None:
        keys.problem(f"{at} is no mapping: {value!r}", key=at, fix="write keys with values below it")
    return {}


def _number(keys: Reader, options: Mapping[str, Any], name: str, at: str) -> float:
    """Return a number, 0 where it is left out; anything else is reported."""
    value = options.get(name)
    try:
        if not isinstance(value, bool):
            return float(value or 0)
    except (TypeError, ValueError):
        pass
    keys.problem(f"{at}.{name} is no number: {value!r}", key=f"{at}.{name}", fix="write one, such as 0.1")
    return 0.0


def _own(keys: Reader, at: str, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return env_config by our names; a name that no table has is reported."""
    found = {}
    for name, value in config.items():
        if name in names:
            if value is not None:
                found[names[name]] = value
        elif name not in _ELSEWHERE:
            keys.warn(f"{at}.env_config.{name} has no effect here")
    return found
