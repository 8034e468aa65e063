"""Every sample of every step, one JSON object per line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.records.batches import TrainBatch
from posttrain.records.trajectories import Invalid, Reward, ScoredGroup


def write_samples(path: Path, step: int, groups: Sequence[ScoredGroup], batch: TrainBatch | None = None) -> None:
    """Write the samples of a step (with the advantages of those in the loss) or of a validation (batch None), whole or not
    at all."""
    places = [(group, number) for group in groups for number in range(len(group.outcomes))]  # the rows of the batch
    advantages: Sequence[float | None] = [None] * len(places)
    if batch is not None:
        first = batch.advantages.gather(1, batch.sequences.response_mask.int().argmax(dim=1, keepdim=True)).squeeze(1)
        in_loss = batch.loss_mask.any(dim=1).tolist()
        advantages = [value if trained else None for value, trained in zip(first.tolist(), in_loss, strict=True)]
    lines = [
        json.dumps(_sample(step, group, number, advantage), ensure_ascii=False, allow_nan=False, default=str)
        for (group, number), advantage in zip(places, advantages, strict=True)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    # A lone surrogate (half a character, in someone's error text) has no UTF-8; its escape is valid JSON.
    beside.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
    os.replace(beside, path)


def _sample(step: int, group: ScoredGroup, number: int, advantage: float | None) -> dict[str, object]:
    prompt, trajectory, outcome = group.group.prompt, group.group.trajectories[number], group.outcomes[number]
    return {
        "step": step,
        "sample_id": trajectory.sample_id,
        "prompt_id": prompt.prompt_id,
        "data_source": prompt.data_source,
        "prompt": prompt.text,
        "response": trajectory.text,
        "ground_truth": as_json(prompt.ground_truth),
        "reward": outcome.value if isinstance(outcome, Reward) else None,
        "reward_terms": dict(outcome.terms) if isinstance(outcome, Reward) else {},
        "reward_texts": dict(outcome.texts) if isinstance(outcome, Reward) else {},
        "invalid": {"reason": outcome.reason, "detail": outcome.detail} if isinstance(outcome, Invalid) else None,
        "advantage": advantage,
        "stop_reason": str(trajectory.stop_reason),
        "policy_version": trajectory.policy_version,
        "response_tokens": len(trajectory.token_ids),
    }


def as_json(value: Any) -> Any:
    """The value, or its text where JSON has no form for it (NaN in a dataset, keys that are not strings)."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except (ValueError, TypeError):
        return str(value)
    return value
