"""Judges on the run's own devices: a language model that grades the responses of a domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.look import CONFIG, written_config
from posttrain.dialects.roll.rules.placement import ENGINES, READERS, device_ids
from posttrain.dialects.roll.rules.reward_workers import JUDGE, JUDGE_EXTRACT, SHORT_JUDGE_TEMPLATE
from posttrain.dialects.roll.rules.templates import TEMPLATES

# Keys of a judge's worker that count; other reward workers are functions.
_READ = (
    "model_args.model_name_or_path", "generating_args.max_new_tokens", "generating_args.temperature", "generating_args.top_p",
    "generating_args.top_k", "data_args.template", "strategy_args.strategy_name", "device_mapping",
)  # fmt: skip
_OF_THE_CLUSTER = ("model_args.model_name_or_path", "strategy_args.strategy_name", "device_mapping")


def is_local_judge(keys: Reader, domain: str) -> bool:
    """Return True for a judge that the run samples itself: the worker's own model, or the section reward_model."""
    at = f"rewards.{domain}"
    worker = str(keys[f"{at}.worker_cls"]).rpartition(".")[2]
    return worker == JUDGE and keys[f"{at}.judge_model_type"] in ("inference", "cluster")


def judges(keys: Reader, domains: Sequence[str]) -> dict[str, Any]:
    """Return reward.judge, and reward.more_judges where domains have different ones; unread keys of models are reported."""
    local = [name for name in domains if is_local_judge(keys, name)]
    clusters = [name for name in local if keys[f"rewards.{name}.judge_model_type"] == "cluster"]
    for name in domains:
        unread = () if name in local and name not in clusters else _OF_THE_CLUSTER if name in clusters else _READ
        reason = "the section reward_model is the judge" if name in clusters else "a reward here is a function"
        for key in unread:
            keys.ignore(f"rewards.{name}.{key}", reason)
    if not clusters:
        for key in ("strategy_args", "device_mapping", "model_args", "generating_args", "data_args"):
            keys.ignore(f"reward_model.{key}", "no domain has judge_model_type: cluster")
    if not local:
        return {}
    settings = {name: _settings(keys, name) for name in local}
    tags = {name: list(keys[f"rewards.{name}.tag_included"]) for name in local}
    shared: list[list[str]] = []  # domains that have the same judge
    for name in local:
        for alike in shared:
            if settings[name] == settings[alike[0]]:
                alike.append(name)
                break
        else:
            shared.append([name])
    if len(shared) > 1:
        for name in local:
            if not tags[name]:
                keys.problem(
                    f"rewards.{name} includes no tag, and there are several judges",
                    key=f"rewards.{name}.tag_included",
                    fix=f"use rewards.{name}.tag_included=[TAG, ...]",
                )
    everything = len(shared[0]) == len(domains) and not all(tags.values())
    first, *others = (
        settings[alike[0]] | {"data_sources": [] if everything else [tag for name in alike for tag in tags[name]]}
        for alike in shared
    )
    more = {f"judge_{alike[0]}": one for alike, one in zip(shared[1:], others, strict=True)}
    return {"reward.judge": first} | ({"reward.more_judges": more} if more else {})


def _settings(keys: Reader, domain: str) -> dict[str, Any]:
    """Return the judge's model, devices and sampling."""
    at = f"rewards.{domain}"
    model = "reward_model" if keys[f"{at}.judge_model_type"] == "cluster" else at
    path = (
        keys[f"{model}.model_args.model_name_or_path"]
        or keys[f"{at}.model_args.model_name_or_path"]
        or keys["pretrain"]
    )
    if path is None:
        key = f"{model}.model_args.model_name_or_path"
        keys.problem(f"{at} names no model to judge by", key=key, fix=f"use {key}=FOLDER, or a hub id")
        path = ""
    strategy = keys[f"{model}.strategy_args.strategy_name"]
    engine = ENGINES.get(strategy, strategy)
    if engine not in ("hf", "vllm", "sglang", "native"):
        key = f"{model}.strategy_args.strategy_name"
        keys.problem(f"{key} is {strategy}, which samples nothing", key=key, fix=f"use {key}=hf_infer or vllm")
        engine = "native"
    args = f"{at}.generating_args"
    ids = device_ids(keys, model)
    settings: dict[str, Any] = {
        "path": path,
        "engine": engine,
        "engine_options": _options(keys, model, engine),
        "temperature": keys[f"{args}.temperature"],
        "top_p": keys[f"{args}.top_p"],
        "top_k": max(keys[f"{args}.top_k"], 0),
        "max_tokens": keys[f"{args}.max_new_tokens"] or 512,
        "extract": JUDGE_EXTRACT,
        "prompt_template": SHORT_JUDGE_TEMPLATE,
    }
    if ids:
        settings["devices"] = ids
    thinking = TEMPLATES.get(keys[f"{at}.data_args.template"], {}).get("data.chat_template_options.enable_thinking")
    if thinking is not None:
        settings["chat_template_options"] = {"enable_thinking": thinking}
    options = keys.section(f"{at}.options")
    return settings | {name: value for name, value in options.items() if name in ("extract", "prompt_template")}


def _options(keys: Reader, section: str, engine: str) -> dict[str, Any]:
    """Return the written strategy_config of a judge that vLLM or SGLang samples."""
    found = {}
    for name, value in written_config(keys, section).items():
        key = f"{section}.{CONFIG}.{name}"
        if name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if value and value > 1:
                keys.plan_only(f"{key}={value} is planned: a judge that several devices share", key=key,
                               fix=f"use {key}=1: each device has a copy")  # fmt: skip
        elif name == "load_format":
            keys.ignore(key, "a judge reads its weights from its folder")
        elif engine not in ("vllm", "sglang") or READERS.get(name, engine) != engine:
            keys.ignore(key, f"{engine} has no such setting")
        else:
            found[name] = value
    return found
