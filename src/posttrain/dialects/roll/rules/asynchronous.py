"""Asynchronous generation of ROLL."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reading import Reader
from posttrain.dialects.roll.rules.look import is_agentic

_RATIO = "async_generation_ratio"


def asynchronous(keys: Reader) -> dict[str, Any]:
    """Return the mode and its bound; empty for a synchronous run."""
    ratio = keys[_RATIO]
    if ratio <= 0:  # negative numbers are reported by the lengths
        return {}
    if ratio % 1 and is_agentic(keys):
        keys.problem(
            f"{_RATIO} is {ratio}, and the agentic pipeline counts whole steps",
            key=_RATIO,
            fix=f"use {_RATIO}={int(ratio) + 1}",
        )
        return {}
    whole = int(ratio) if ratio % 1 == 0 else ratio
    return {"asynchronous.mode": "separate", "asynchronous.max_staleness_steps": whole}
