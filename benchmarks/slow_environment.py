"""An environment that answers after log-normal times; a file of its own, so that its processes import nothing large."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from posttrain.interfaces.env import EnvSpec, EnvStart, EnvStep

SPREAD = 1.0  # of the log-normal answer times


class Slow:
    """Answers after a while."""

    def __init__(self, spec: EnvSpec, turns: int, median_s: float) -> None:
        self._turns, self._median_s = turns, median_s

    def reset(self, seed: int) -> EnvStart:
        self._delays = delays(seed, self._turns, self._median_s)
        return EnvStart(messages=[{"role": "user", "content": f"begin {seed % 100}"}])

    def step(self, action: str) -> EnvStep:
        time.sleep(self._delays.pop(0))
        left = len(self._delays)
        return EnvStep(messages=[{"role": "user", "content": f"{left} left"}], reward=1.0, done=left == 0)

    def close(self) -> Mapping[str, float]:
        return {}


def delays(seed: int, turns: int, median_s: float) -> list[float]:
    """Return the answer times of an episode, seconds."""
    draws = random.Random(seed)
    return [median_s * draws.lognormvariate(0.0, SPREAD) for _ in range(turns)]
