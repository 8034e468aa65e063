"""Labels, margins and log-probs of a preference row: checked values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from posttrain.data.cells import BadCell
from posttrain.data.record_files import described

LARGEST = 3.4e38  # of float32, in which losses are computed
# Labels as csv files write them
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def label_of(value: Any) -> bool:
    """Return a label. Raises: BadCell for a value that is none."""
    if isinstance(value, str):
        value = LABELS.get(value.strip().lower(), value)
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise BadCell(f"holds {described(value)}; true or false is expected")


def reference_of(values: Sequence[Any]) -> tuple[float, ...]:
    """Return log-probs of whole completions. Raises: BadCell for a value that is none."""
    found = tuple(number_of(value) for value in values)
    if any(value > 0 for value in found):
        raise BadCell(f"holds {max(found):g}; the log-prob of a completion is not above 0")
    return found


def number_of(value: Any) -> float:
    """Return a number of float32, which csv files hold as text. Raises: BadCell for another value."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise BadCell(f"holds {described(value)}; a number is expected")
    if abs(number) > LARGEST:
        raise BadCell(f"holds {number:g}; numbers end at {LARGEST:g}")
    return number
