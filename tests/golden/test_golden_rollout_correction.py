"""Importance weights and rejection masks, against verl's and SkyRL's numbers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from posttrain.algos.rollout_correction import importance_weights, rejection_mask

REDUCTIONS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}


def where(mask: Tensor, expected: list[list[float]]) -> list[list[float | None]]:
    """What stands behind the mask is not compared: SkyRL leaves numbers there, we leave 0."""
    return [
        [value if there else None for value, there in zip(row, here, strict=True)]
        for row, here in zip(expected, mask.tolist(), strict=True)
    ]


def bounds(threshold: float | str) -> dict[str, Any]:
    low, _, high = str(threshold).rpartition("_")
    return {"low": float(low) if low else None, "high": float(high)}


@pytest.mark.golden("rollout_correction.json")
def test_verl_rollout_correction(case: Any) -> None:
    old, rollout, mask, params = case.tensor("old_logprobs"), case.tensor("rollout_logprobs"), case.mask(), case.params
    if "rollout_is" in params:
        weights = importance_weights(
            old,
            rollout,
            mask,
            level=params["rollout_is"],
            normalize=params.get("rollout_is_batch_normalize", False),
            **bounds(params["rollout_is_threshold"]),
        )
        case.check(weights, case.outputs["weights"])
    kept = mask
    if "rollout_rs" in params:
        reduction, _, statistic = params["rollout_rs"].rpartition("_")
        limits = bounds(params["rollout_rs_threshold"])
        kept = rejection_mask(old, rollout, mask, statistic=statistic, reduction=REDUCTIONS[reduction], **limits)
    assert kept.long().tolist() == case.outputs["mask"]


@pytest.mark.golden("off_policy_correction_skyrl.json")
def test_skyrl_off_policy_correction(case: Any) -> None:
    old, rollout, mask, params = case.tensor("old_logprobs"), case.tensor("rollout_logprobs"), case.mask(), case.params
    if params.get("tis_ratio_type"):
        assert params["tis_ratio_type"] == "token"
        weights = importance_weights(old, rollout, mask, level="token", high=params["token_tis_ratio_clip_high"])
        case.check(weights, where(mask, case.outputs["weights"]))
    kept = mask
    if params.get("sequence_mask_metric"):
        assert params["sequence_mask_metric"] == "product"
        low, high = params.get("product_mask_low", 0.5), params.get("product_mask_high", 2.0)  # SkyRL's defaults
        # their bounds are on old / rollout, those of k1 on rollout / old
        limits = {"low": 1 / high, "high": 1 / low}
        kept = rejection_mask(old, rollout, mask, statistic="k1", reduction="sequence_sum", **limits)
    assert kept.long().tolist() == case.outputs["mask"]
