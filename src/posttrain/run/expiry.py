"""Save a run before the rented machine that it runs on ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Variables in which a platform announces the end of a machine, in Unix seconds; verl reads the same two.
ENDS = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)


class Expiry:
    """Tells after a step if another one, as long as the longest so far, and ``margin_s`` still fit before the machine's end."""

    def __init__(self, margin_s: float | None, say: Callable[[str], None], now: Callable[[], float] = time.time):
        self._margin_s = margin_s
        self._say = say
        self._now = now
        self._longest_s = 0.0
        self._has_said = False

    def near(self, step_s: float) -> bool:
        """True if the state after this step, which took so long, is to be saved. Without an announced end never; with a
        passed one always."""
        self._longest_s = max(self._longest_s, step_s)
        name = next((name for name in ENDS if os.environ.get(name)), None)
        if self._margin_s is None or name is None:
            return False
        text = os.environ[name]
        try:
            left_s = float(text) - self._now()
        except ValueError:
            self._once(
                f"{name}={text!r} is no time in Unix seconds, so no checkpoint is written before the machine's end"
            )
            return False
        if left_s > self._longest_s + self._margin_s:
            return False
        self._once(f"{name}: this machine ends in {left_s:.0f} s; every step is saved from here on")
        return True

    def _once(self, text: str) -> None:
        if not self._has_said:
            self._has_said = True
            self._say(text)
