"""verl's function that scores by data source, answered by the built-in scorers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from posttrain.records.prompts import Prompt
from posttrain.rewards.built_in import built_in
from posttrain.rewards.options import RunWide


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> Any:
    """Return the score of a response by the scorer of its data source, or a mapping with it under "score".

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
    return _scorer()(prompt, solution_str)


_default_compute_score = default_compute_score


@cache
def _scorer() -> Any:
    return built_in("by_data_source", {}, RunWide())
