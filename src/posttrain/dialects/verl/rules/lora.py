"""LoRA of actor and critic."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reading import Reader
from posttrain.dialects.verl.rules.look import get

_OURS = {
    "lora_alpha": "alpha",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "lora_adapter_path": "adapter_path",
}


def lora(keys: Reader, section: str, role: str) -> dict[str, Any]:
    """The fields of a role's adapter; none where all weights are trained. An adapter to start from turns it on, too."""
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
