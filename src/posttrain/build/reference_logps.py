"""Log-probs of the reference for all rows, before the policy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posttrain.backends.torch_training.start import prepare_device, start_reference
from posttrain.config.tune import TuneConfig
from posttrain.data.preference_batches import preference_batch
from posttrain.interfaces.train_engine import ScoringEngine
from posttrain.records.preferences import Preference
from posttrain.steps.preferences import ROWS_AT_ONCE, reference_logps


def with_reference_logps(config: TuneConfig, *datasets: Sequence[Preference]) -> list[list[Preference]]:
    """Return the rows of each dataset with the reference's log-probs of their completions. The reference is loaded for it, and
    released."""
    reference = start_reference(config, prepare_device(config), None)
    return [scored(rows, reference) for rows in datasets]


def scored(rows: Sequence[Preference], reference: ScoringEngine) -> list[Preference]:
    """Return the rows with a reference's log-probs of their completions."""
    found: list[Preference] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        values = iter(reference_logps(reference, preference_batch(part)).tolist())
        found += [replace(row, ref_logps=tuple(next(values) for _ in row.sides)) for row in part]
    return found
