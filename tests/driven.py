"""Episodes of environments that request their turns, which a test answers."""

from __future__ import annotations

import queue
from typing import Any

from posttrain.interfaces.env import AskingEnv, EnvAsk

# A package in whose name nothing can be started
RAY = """
def remote(*given, **options):
    raise RuntimeError("a worker would start")
def get(what):
    raise RuntimeError("nothing to get")
def init(**options): ...
def is_initialized(): return True
"""


class Driven:
    """An episode whose turns the test takes."""

    def __init__(self, env: AskingEnv, seed: int):
        self.env: Any = env
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        env.begin(seed, self.events.put)

    def next(self) -> Any:
        event = self.events.get(timeout=60)
        if isinstance(event, Exception):
            raise event
        return event

    def answer(self, asked: EnvAsk, text: str, *ids: int) -> None:
        if asked.options.tokens:
            self.env.sampled(asked.turn, ids, [-1.0] * len(ids))
        self.env.answer(asked.turn, text, cut=False, prompt_tokens=1, response_tokens=len(ids))
