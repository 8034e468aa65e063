"""Models that the engine megatron supports, and sizes into which it can split them, from the config.json of a local folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.plan.engine import engine_that
from posttrain.plan.engines.megatron.experts import (
    EXPERT_FAMILIES,
    EXPERT_OPTIONS,
    EXPERTS_OVER,
    ONE_EXPERT_OVER,
    expert_problems,
)
from posttrain.plan.engines.megatron.options import CHUNKS, SPLIT, MegatronSettings, flat_options
from posttrain.plan.experts import expert_layers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *EXPERT_FAMILIES)  # Hugging Face's model_type


def unsupported(text: Mapping[str, Any]) -> str | None:
    """Return the reason why megatron-core's layers, as combined here, cannot form a model, from the fields of its config.json (of
    a vision model, of its text_config); None when they can."""
    kind = text.get("model_type")
    if kind not in FAMILIES:
        return f"{kind} is not among {', '.join(FAMILIES)}"
    if text.get("attention_bias"):
        return "its attention has a bias on its output (attention_bias)"
    if text.get("mlp_bias"):
        return "its MLP has biases (mlp_bias)"
    if text.get("hidden_act", "silu") != "silu":
        return f"its MLP uses {text['hidden_act']}, and silu is known here"
    windowed = text.get("sliding_window") if kind in ("mistral", "mixtral") else text.get("use_sliding_window")
    if windowed or "sliding_attention" in (text.get("layer_types") or []):
        return "its attention looks at a window of tokens (sliding_window)"
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    if scaling not in ("default", "linear", "llama3"):
        return f"its rotary embedding is scaled by {scaling}, and default, linear and llama3 are known here"
    if rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        return "its rotary embedding turns a part of each head (partial_rotary_factor)"
    return None


def model_problems(path: str, *, role: str, tensor: int, pipeline: int, settings: MegatronSettings) -> list[Problem]:
    """Report what in a local model folder contradicts the sizes or the engine. The engine itself checks hub ids."""
    text = _text_of(path)
    if text is None:
        return []
    reason = unsupported(text)
    if reason:
        other = engine_that(lambda plan: plan.shares_out and plan.takes_any_model)
        fix = f"use {role}.engine={other}, or a Llama, Mistral, Mixtral, Qwen2 or Qwen3 model"
        return [Problem(f"megatron cannot train {path}: {reason}", fix=fix, field=f"{role}.engine")]
    try:
        experts = expert_layers(text)
    except KeyError as missing:
        what = f"the config.json of {path} has no {missing.args[0]}"
        return [Problem(what, fix="copy the model again", field=f"{role}.engine")]
    problems = expert_problems(
        path,
        experts,
        settings.experts,
        role=role,
        tensor=tensor,
        pipeline=pipeline,
        sequence_parallel=settings.sequence_parallel,
    )
    width, layers = text.get("intermediate_size") or 0, text.get("num_hidden_layers") or 0
    groups = text.get("num_key_value_heads") or text.get("num_attention_heads") or 1
    if experts is not None and all(experts.layers):
        width = 0  # no layer has the MLP that the file gives a width of
    if width % tensor or (groups % tensor and tensor % groups):
        what, of = (f"an MLP of width {width}", width) if width % tensor else (f"{groups} key/value heads", groups)
        fits = max(
            size for size in range(1, tensor) if width % size == 0 and (groups % size == 0 or size % groups == 0)
        )
        field = f"{role}.tensor_parallel"
        text_ = f"{path} has {what}, which {tensor} devices cannot hold in equal parts ({of} / {tensor} = {of / tensor:.4g})"
        problems.append(Problem(text_, fix=f"use {field}={fits}", field=field))
    unequal = _unequal(layers, pipeline, settings)
    if unequal:
        fits = max(size for size in range(1, pipeline + 1) if layers % size == 0)
        field = f"{role}.pipeline_parallel"
        what = f"{path} has {layers} layers, which {pipeline} stages cannot share so ({unequal})"
        fix = f"use {field}={fits} and equal stages, or other numbers in {role}.engine_options"
        less = (replace(settings, virtual=count, layers_per_virtual_stage=None) for count in range(layers, 0, -1))
        if even := next((each.virtual for each in less if not _unequal(layers, pipeline, each)), None):
            fix = f"use {role}.engine_options.{CHUNKS}={even}, or a number that divides it"
        problems.append(Problem(what, fix=fix, field=field))
    return problems


def _text_of(path: str) -> Mapping[str, Any] | None:
    """The fields of a config.json that are about text; None where there are none to read, which is for check_run_files to
    say."""
    try:
        whole = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text: Mapping[str, Any] = whole.get("text_config", whole)
    return text if "model_type" in text else None


def _unequal(layers: int, stages: int, settings: MegatronSettings) -> str | None:
    """The arithmetic that does not come out; None where it does."""
    split = settings.split
    given = [split[name] for name in SPLIT[:2] if name in split]
    counted = [name for name in SPLIT[2:] if name in split]
    if given:
        rest, left = layers - sum(given), stages - len(given)
        if not (rest >= left and (rest % left == 0 if left > 0 else rest == left == 0)):
            return f"{layers} - {' - '.join(map(str, given))} = {rest} are left for {left}"
        stage_sizes = [*given, *([rest // left] if left > 0 else [])]
    else:
        total = layers + len(counted)
        sums = " + ".join([str(layers), *["1"] * len(counted)])
        if total % stages:
            return f"{sums}{f' = {total}' if counted else ''}; {total} / {stages} = {total / stages:.4g}"
        stage_sizes = [total // stages]
    if stages == 1:
        return None
    each = settings.layers_per_virtual_stage
    if each is not None and stage_sizes[0] % each:
        return f"{stage_sizes[0]} in a stage, in stretches of {each}: {stage_sizes[0]} / {each} = {stage_sizes[0] / each:.4g}"
    uneven = next((size for size in stage_sizes if size % settings.virtual), None)
    if uneven is not None:
        stretches = settings.virtual
        return f"{uneven} in a stage, in {stretches} virtual stages: {uneven} / {stretches} = {uneven / stretches:.4g}"
    return None


def options_without_experts(options: Mapping[str, Any], path: str, *, role: str = "policy") -> list[str]:
    """Report options about experts, when the model in a local folder has none, in sentences."""
    if not has_no_experts(path):
        return []
    return [
        f"{where} has no effect: the model has no experts"
        for name, (where, value) in flat_options(options, f"{role}.engine_options").items()
        if name in EXPERT_OPTIONS and name != EXPERTS_OVER and value and (name != ONE_EXPERT_OVER or value != 1)
    ]


def has_no_experts(path: str) -> bool:
    """Return True when the model in a local folder is known to have no experts."""
    text = _text_of(path)
    try:
        return text is not None and expert_layers(text) is None
    except KeyError:
        return False
