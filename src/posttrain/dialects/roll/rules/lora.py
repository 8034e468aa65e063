"""LoRA of actor and critic."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader

_REGULAR = "*$|("  # what makes a text a regular expression, in ROLL too


def lora(keys: Reader, section: str, role: str) -> dict[str, Any]:
    """The fields of a role's adapter; none without lora_target."""
    at = f"{section}.model_args"
    target = keys[f"{at}.lora_target"]
    if not target:
        for name in ("lora_rank", "lora_alpha", "lora_dropout", "adapter_name_or_path"):
            keys.ignore(f"{at}.{name}", "read with lora_target only")
        return {}
    rank, alpha = keys[f"{at}.lora_rank"], keys[f"{at}.lora_alpha"]
    rank = 8 if rank is None else rank
    found = {
        "rank": rank,
        "alpha": 2 * rank if alpha is None else alpha,
        "dropout": keys[f"{at}.lora_dropout"],
        "target_modules": target_modules(target),
        "adapter_path": keys[f"{at}.adapter_name_or_path"],
    }
    return {f"{role}.lora.{name}": value for name, value in found.items() if value is not None}


def target_modules(target: str | list[str]) -> str | list[str]:
    """all (all-linear in peft's words), a list, names between commas, or a regular expression."""
    if isinstance(target, list):
        return target
    if target in ("all", "all-linear"):
        return "all-linear"
    if any(sign in target for sign in _REGULAR):
        return target
    return [name.strip() for name in target.split(",")]
