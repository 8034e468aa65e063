"""verl's function that scores by data source, answered by the built-in scorers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from posttrain.records.prompts import Prompt
from posttrain.rewards.built_in import built_in
from posttrain.rewards.options import RunWide

DAPO_SOURCES = ("math_dapo", "math", "math_dapo_reasoning")


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> Any:
    """Return the score of a response by the scorer of its data source: a number, as managers of verl assign it to a tensor;
    for tasks of DAPO a mapping with it under "score", as in verl.

    Raises: NoRewardForSource where there is none.
    """
    prompt = Prompt(
        prompt_id="",
        token_ids=(),
        text="",
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=dict(extra_info or {}),
    )
    found = _scorer()(prompt, solution_str)
    is_mapping = data_source in DAPO_SOURCES or data_source.startswith("aime")
    return float(found["score"]) if isinstance(found, Mapping) and not is_mapping else found


_default_compute_score = default_compute_score


@cache
def _scorer() -> Any:
    return built_in("by_data_source", {}, RunWide())
