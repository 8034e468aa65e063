"""Workers of this process, each with a stream that a driver leads, in the place of Ray's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import pytest

from posttrain.backends.rollout.native import NativeEngine
from posttrain.interfaces.rollout_engine import OnTokens
from posttrain.records.trajectories import SamplingParams

pytest.importorskip("ray")
from posttrain.backends.runtime.ray.led_stream import LedStream
from posttrain.backends.runtime.ray.lockstep import HeldCaches, LockstepStream
from posttrain.backends.runtime.ray.shelf import Shelf
from posttrain.backends.runtime.ray.worker import Outbox
from posttrain.backends.runtime.ray.worker_group import WorkerGroup


@dataclass(eq=False)
class Worker:
    name: str
    led: LedStream
    trouble: str | None = None

    @property
    def handle(self) -> Worker:
        return self


class Workers:
    """A cluster and its watch: a call is made when it is waited for, in any order of the workers."""

    def __init__(self, engines: Sequence[NativeEngine], *, backwards: bool = False):
        self.engines, self.backwards = engines, backwards
        self.members: list[Any] = [
            Worker(f"trainer rank {rank}", LedStream(engine, Outbox(), lambda: None))
            for rank, engine in enumerate(engines)
        ]
        self.group = WorkerGroup(
            cluster=cast(Any, self),
            watch=cast(Any, self),
            members=self.members,
            timeout_s=1.0,
            shelf=Shelf(lambda value: value),
        )
        self.caches = HeldCaches()

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> LockstepStream:
        return LockstepStream(self.group, sampling, on_tokens, self.caches)

    def call(self, handle: Worker, method: str, path: str = "", wanted: bool = False, *arguments: Any) -> Any:
        return (lambda: attrgetter(path)(handle)(*arguments)) if method == "call" else lambda: None

    def wait(
        self,
        promises: dict[Worker, Any],
        what: str,
        deadline_s: float,
        on_round: Callable[[], None] | None = None,
    ) -> dict[Worker, Any]:
        order = sorted(promises, key=self.members.index, reverse=self.backwards)
        return {member: promises[member]() for member in order}

    def weights_changed(self, version: int) -> None:
        for engine in self.engines:
            engine.weights_changed(version)
