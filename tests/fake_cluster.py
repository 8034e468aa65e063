"""A cluster of the Ray runtime whose workers are values."""

from __future__ import annotations

import time
from typing import Any

from posttrain.backends.runtime.ray import processes
from posttrain.backends.runtime.ray.processes import tail


class Promise:
    """A value that comes, or an error."""

    def __init__(self, value: Any = None, after_s: float = 0.0):
        self.value = value
        self.at = time.monotonic() + after_s


class FakeCluster:
    """Workers that are values; ``dead`` ones break their promises."""

    node = "here"

    def __init__(self) -> None:
        self.states: dict[str, str] = {}

    def call(self, handle: Any, method: str, *arguments: Any) -> Promise:
        from posttrain.backends.runtime.ray.worker import FinishedGroups, News, PackedGroups

        silent = self.states.get(handle) in ("stopped", "busy")
        none = PackedGroups.of(FinishedGroups.of([]))
        return Promise(News(lines=[], tokens=0, sequences=0, groups=none, notices=[]), 1e6 if silent else 0.0)

    def call_for_two(self, handle: Any, method: str, *arguments: Any) -> tuple[Promise, Promise]:
        return self.call(handle, method, *arguments), Promise(())

    def ready(self, promises: list[Promise], timeout_s: float, *, whole: bool = False) -> list[Promise]:
        until = time.monotonic() + timeout_s
        while True:
            done = [each for each in promises if each.at <= time.monotonic()]
            if len(done) >= (len(promises) if whole else 1) or time.monotonic() >= until:
                return done
            time.sleep(0.01)

    def value(self, promise: Promise, timeout_s: float) -> Any:
        if isinstance(promise.value, Exception):
            raise promise.value
        return promise.value

    def on_node(self, node: str, function: Any, *arguments: Any) -> Any:
        if function is processes.state:
            return {"stopped": "stopped"}.get(self.states.get(arguments[0].host, ""), "running")
        return "the last thing it said\n" if function is tail else None

    def kill(self, handle: Any) -> None:
        pass
