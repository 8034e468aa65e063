"""An environment of a user's own that can be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.interfaces.env import EnvAsk, EnvSpec, EnvStart, EnvStep


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


class Asking:
    """Asks for six turns of two players in turn, of whom the first is trained, and says how many characters it has read."""

    def __init__(self, spec: EnvSpec) -> None:
        self.read: list[int] = []

    def begin(self, seed: int, emit: Callable[[Any], None]) -> None:
        self.emit = emit
        self.ask()

    def ask(self) -> None:
        number = len(self.read)
        said = [{"role": "user", "content": f"{sum(self.read)}"}]
        self.emit(EnvAsk(turn=str(number), line=number % 2, messages=said, trained=number % 2 == 0))

    def answer(self, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int) -> None:
        assert turn == str(len(self.read))
        self.read.append(len(action) + prompt_tokens)
        if len(self.read) == 6:
            self.emit(EnvStep(done=True, stop="over", reward=float(sum(self.read))))
        else:
            self.ask()

    def state(self) -> Any:
        return self.read

    def restore(self, state: Any, emit: Callable[[Any], None]) -> None:
        self.read, self.emit = list(state), emit

    def close(self) -> dict[str, float]:
        return {"turns": float(len(self.read))}
