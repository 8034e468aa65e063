"""An environment of a user's own that can be saved."""

from __future__ import annotations

from typing import Any

from posttrain.interfaces.env import EnvSpec, EnvStart, EnvStep


class Counting:
    """Says how many steps it has seen. ``restore`` and ``state`` are what a user would write."""

    def __init__(self, spec: EnvSpec, saves: bool = True):
        self.count = 0
        if not saves:
            self.state = self.restore = None  # type: ignore[method-assign, assignment]

    def reset(self, seed: int) -> EnvStart:
        return EnvStart(messages=[{"role": "user", "content": "0"}])

    def step(self, action: str) -> EnvStep:
        self.count += 1
        return EnvStep(messages=[{"role": "user", "content": str(self.count)}], reward=1.0, done=self.count == 3)

    def state(self) -> Any:
        return {"count": self.count}

    async def restore(self, state: Any) -> None:
        self.count = state["count"]

    def close(self) -> dict[str, float]:
        return {"count": float(self.count)}
