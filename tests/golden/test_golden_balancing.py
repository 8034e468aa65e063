"""Partitions and micro-batches, against verl's: as balanced or better, and never more of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.algos.balancing import balanced_parts, token_budget_parts
from posttrain.errors import RequestError

# This file compares whole numbers, so it has no tolerance to read.
CASES = json.loads((Path(__file__).parent / "data" / "balancing.json").read_text(encoding="utf-8"))["cases"]


def of_kind(kind: str) -> Any:
    cases = [case for case in CASES if case["params"]["kind"] == kind]
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


@of_kind("partition")
def test_partitions(case: dict[str, Any]) -> None:
    lengths, params, outputs = case["inputs"]["lengths"], case["params"], case["outputs"]
    parts = balanced_parts(lengths, params["parts"], equal_size=params["equal_size"])
    assert sorted(item for part in parts for item in part) == list(range(len(lengths)))
    sums = sorted(sum(lengths[item] for item in part) for part in parts)
    assert sums == outputs["sums"] or sums[-1] - sums[0] < outputs["spread"]
    assert not outputs["sizes_equal"] or len({len(part) for part in parts}) == 1


@of_kind("micro_batches")
def test_micro_batches(case: dict[str, Any]) -> None:
    lengths, params, outputs = case["inputs"]["lengths"], case["params"], case["outputs"]
    at_least = params.get("min_num_micro_batch", 1)
    if "error" in outputs:
        with pytest.raises(RequestError, match="does not fit"):
            token_budget_parts(lengths, params["max_tokens"], at_least=at_least)
        return
    parts = token_budget_parts(lengths, params["max_tokens"], at_least=at_least)
    assert sorted(item for part in parts for item in part) == list(range(len(lengths)))
    assert all(part for part in parts)
    assert outputs["fewest_possible"] <= len(parts) <= outputs["micro_batches"]
    assert max(sum(lengths[item] for item in part) for part in parts) <= params["max_tokens"]
