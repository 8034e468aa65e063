"""The columns of a row as verl's dataset has them, for code of the user's own that reads verl's batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.interfaces.env import Message


def columns_of(row: Mapping[str, Any], messages: Sequence[Message]) -> dict[str, Any]:
    """Return ``non_tensor_batch`` of one row of ours, whose further columns are entries of ``extra_info``, too."""
    truth = row.get("ground_truth")
    extra = {name: value for name, value in row.items() if name not in ("data_source", "ground_truth")}
    return {
        **extra,
        "data_source": row.get("data_source"),
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
        "index": extra.get("index", 0),
        "raw_prompt": [dict(message) for message in messages],
    }
