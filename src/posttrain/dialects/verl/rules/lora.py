"""LoRA of actor and critic."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get

_OURS = {
    "lora_alpha": "alpha",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "lora_adapter_path": "adapter_path",
}

_MEGATRONS = ("alpha", "dropout", "target_modules", "exclude_modules", "adapter_path")
# Megatron's names of layers, where several matrices are one, and those of its canonical_lora -> transformers'.
LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
_TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]  # verl's own


def _megatrons(keys: Reader, section: str, role: str) -> dict[str, Any]:
    """The fields of an adapter that is written in Megatron's words."""
    found = {
        "rank": keys[f"{section}.rank"],
        "alpha": get(keys, f"{section}.alpha", 32),
        "dropout": get(keys, f"{section}.dropout", 0.0),
        "target_modules": _named(keys, f"{section}.target_modules", _TARGETS),
        "exclude_modules": _named(keys, f"{section}.exclude_modules", []) or None,
        "adapter_path": get(keys, f"{section}.adapter_path"),
    }
    return {f"{role}.lora.{name}": value for name, value in found.items() if value is not None}


def _named(keys: Reader, key: str, otherwise: list[str]) -> list[str]:
    """Layers by transformers' names. Names with a place in the model (``*.layers.0.*.linear_qkv``) are refused."""
    given = get(keys, key, otherwise)
    names = [given] if isinstance(given, str) else given
    unknown = [name for name in names if name not in LAYERS and not name.endswith("_proj")]
    if unknown:
        what = f"{key} names {unknown[0]!r}, which is no kind of layer (known: {', '.join(LAYERS)})"
        keys.problem(what, key=key, fix=f"use {key}=[{','.join(_TARGETS)}]")
    return list(dict.fromkeys(layer for name in names for layer in LAYERS.get(name, (name,))))


def lora(keys: Reader, section: str, role: str) -> dict[str, Any]:
    """The fields of a role's adapter; none where all weights are trained. An adapter to start from turns it on, too."""
    if get(keys, f"{section}.lora.rank", 0) > 0:
        return _megatrons(keys, f"{section}.lora", role)
    for name in _MEGATRONS:
        keys.ignore(f"{section}.lora.{name}", "lora.rank is 0, so it asks for no adapter")
    rank = get(keys, f"{section}.lora_rank", 0)
    if rank < 0:
        keys.problem(
            f"{section}.lora_rank is {rank}", key=f"{section}.lora_rank", fix="use 0 for no adapter, or a rank"
        )
        return {}
    if not rank and get(keys, f"{section}.lora_adapter_path") is None:
        for name in _OURS:
            keys.ignore(f"{section}.{name}", "lora_rank is 0, so all weights are trained")
        return {}
    found = {ours: get(keys, f"{section}.{name}") for name, ours in _OURS.items()} | {"rank": rank or None}
    return {f"{role}.lora.{name}": value for name, value in found.items() if value is not None}
