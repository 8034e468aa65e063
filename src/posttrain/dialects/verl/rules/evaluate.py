"""evaluation.yaml: what several of its keys decide together."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader

_FUNCTION = "custom_reward_function"


def evaluate_rules(keys: Reader) -> dict[str, Any]:
    """EvaluateConfig fields by dotted name: a function of the user's, or the built-in scorer of each data source."""
    path, name, options = (
        keys[f"{_FUNCTION}.path"],
        keys[f"{_FUNCTION}.name"] or "compute_score",
        keys.section(f"{_FUNCTION}.reward_kwargs"),
    )
    if path is None:
        term = {"name": "by_data_source" if name == "compute_score" else name}
    else:
        term = {"name": name, "path": path}
    return {"reward.terms": [term | ({"options": options} if options else {})]}
