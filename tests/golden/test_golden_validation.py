"""Metrics of several answers per held-out prompt, against verl's numbers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from posttrain.algos.statistics import reduced_by_name
from posttrain.algos.validation import majority_value, mean_over_prompts, sample_statistics

BOOTSTRAP_ATOL = 0.05  # the file's, where verl draws at random


@pytest.mark.golden("validation_metrics.json", "four_values", "two_prompts")
def test_statistics_over_samples(case: Any) -> None:
    rows: dict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(case.inputs["uid"]):
        rows[prompt].append(row)
    values = case.inputs["values"]
    ours = mean_over_prompts(
        [
            sample_statistics(
                [values["score"][row] for row in of_prompt],
                [values["pred"][row] for row in of_prompt] if "pred" in values else None,
            )
            for of_prompt in rows.values()
        ]
    )
    (expected,) = case.outputs.values()
    assert set(ours) == set(expected["score"])
    for name, value in expected["score"].items():
        if "/" in name:
            assert ours[name] == pytest.approx(value, abs=BOOTSTRAP_ATOL), name
        else:
            case.check([ours[name]], [value])


@pytest.mark.golden("validation_metrics.json", "majority")
def test_majority(case: Any) -> None:
    assert majority_value(case.inputs["votes"], case.inputs["values"]) == case.outputs["majority_value"]


@pytest.mark.golden("validation_metrics.json", "reduce_by_name")
def test_reduction_by_name(case: Any) -> None:
    ours = reduced_by_name(case.inputs["metrics"])
    assert set(ours) == set(case.outputs)
    for name, value in case.outputs.items():
        case.check([ours[name]], [value])
