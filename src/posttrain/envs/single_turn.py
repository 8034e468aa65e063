"""Single-turn environment: the policy answers the dataset's row, and the reward terms score the response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.interfaces.env import EnvSpec, EnvStart, EnvStep
from posttrain.registry import ENVS


@ENVS.register("single_turn")
class SingleTurn:
    """Done after the first action, without a reward of its own."""

    def __init__(self, spec: EnvSpec) -> None:
        self._messages = spec.messages

    def reset(self, seed: int) -> EnvStart:
        return EnvStart(messages=self._messages)

    def step(self, action: str) -> EnvStep:
        return EnvStep(done=True)

    def state(self) -> Any:
        """Return an empty state: the next step depends on nothing."""
        return {}

    def restore(self, state: Any) -> None:
        """No-op: there is no state."""

    def close(self) -> Mapping[str, float]:
        return {}
