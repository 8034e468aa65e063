"""Check that prompts and responses fit into a model's positions, as far as its config.json and the limits show; a run checks the
prompts themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config import RunConfig
from posttrain.config.config_apart import overrides_of
from posttrain.errors import ConfigError, Problem


def check_positions(config: RunConfig) -> list[Problem]:
    """Responses that do not fit, however short their prompt is."""
    positions = model_positions(config)
    return [
        Problem(
            f"a prompt of 1 token and a response of up to {tokens} make {tokens + 1}, and the model in {config.model.path} "
            f"has {positions} positions",
            fix=f"use {field}={positions // 2}, or less",
            field=field,
        )
        for field, tokens in _samplings(config)
        if positions is not None and 1 + tokens > positions
    ]


def positions_warnings(config: RunConfig) -> list[str]:
    """Limits that leave room for more than the model has: whether it is needed depends on the longest prompt."""
    positions, prompt = model_positions(config), config.data.max_prompt_tokens
    return [
        f"data.max_prompt_tokens {prompt} + {field} {tokens} = {prompt + tokens}, and the model has {positions} positions: "
        f"training refuses a prompt of more than {positions - tokens} tokens"
        for field, tokens in _samplings(config)
        if positions is not None and 1 + tokens <= positions < prompt + tokens
    ]


def model_positions(config: RunConfig) -> int | None:
    """Return the number of a model's positions; None where its folder is not local or does not name it, or where scaled rotary
    embeddings extend further, each kind by its own rule."""
    try:
        overrides = overrides_of(config.model)
        file = Path(config.model.path).expanduser() / "config.json"
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        nested = values.get("text_config")
        text = {**nested, **overrides.get("text_config", {})} if nested else {**values, **overrides}
        rotary = overrides.get("rope_scaling") or text.get("rope_parameters") or text.get("rope_scaling") or {}
        kind = rotary.get("rope_type", rotary.get("type", "default"))
        positions = text.get("max_position_embeddings")
    except (OSError, ValueError, TypeError, AttributeError, ConfigError):
        return None  # check_run_files says what is wrong with it
    return positions if isinstance(positions, int) and kind == "default" else None


def _samplings(config: RunConfig) -> Iterator[tuple[str, int]]:
    yield "rollout.max_response_tokens", config.rollout.max_response_tokens
    if config.data.validation_files and config.validation.max_response_tokens is not None:
        yield "validation.max_response_tokens", config.validation.max_response_tokens
