"""Models that 4-bit weights (QLoRA) are refused for, by their config.json: known before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.roles import needs_values
from posttrain.errors import Problem

BLOCK = 64  # weights that share a scale, along the inputs of a layer
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def rounding_problems(config: TrainingConfig) -> Iterator[Problem]:
    """Yield the policy, and the critic, whose base cannot be stored in 4 bits. Models that are not folders here pass."""
    asked = [("policy", config.policy.lora, config.model.path)]
    if isinstance(config, RunConfig) and needs_values(config):
        asked.append(("critic", config.critic.lora, config.critic.path or config.model.path))
    for role, lora, path in asked:
        reason = unroundable(path) if lora is not None and lora.quantize is not None else None
        if reason is not None:
            field = f"{role}.lora.quantize"
            yield Problem(f"{path} {reason}", fix=f"leave {field} out: LoRA on the weights as they are", field=field)


def unroundable(path: str) -> str | None:
    """Say why the linear layers of the model in a folder are not stored in 4 bits; None where they are, or nothing is known."""
    try:
        values = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
        text = values.get("text_config", values)
        if any(text.get(name) for name in EXPERTS):
            return "has experts, which are stacks of matrices and not rounded to 4 bits"
        heads = text.get("num_attention_heads") or 1
        head = text.get("head_dim") or text["hidden_size"] // heads
        inputs = {"hidden_size": text["hidden_size"], "heads x head_dim": heads * head}
        inputs["intermediate_size"] = text.get("intermediate_size") or text["hidden_size"]
        odd = next(((name, size) for name, size in inputs.items() if size % BLOCK), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # check_model reports what is wrong with the folder
    return (
        None if odd is None else f"has layers of {odd[1]} inputs ({odd[0]}), which are no whole 4-bit blocks of {BLOCK}"
    )
