"""Crews for tests: samplers in threads of this process, which can be killed and come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from posttrain.backends.serving.thread_crew import SeatInThread, ThreadCrew
from posttrain.errors import RunStopped
from posttrain.interfaces.crew import Order, SamplerLost, Seat
from posttrain.interfaces.rollout_engine import Served
from posttrain.interfaces.train_engine import TrainEngine


class MortalCrew(ThreadCrew):
    """``kill`` loses a sampler with what it had not reported. With ``renew``, another one joins at the next weights."""

    def __init__(
        self,
        seats: Mapping[str, Seat],
        send: Callable[[TrainEngine], Served],
        *,
        resumes: bool = True,
        renew: Callable[[str], Seat] | None = None,
        kills: Callable[[Order], bool] | None = None,
    ):
        super().__init__(seats, send, resumes=resumes)
        self._renew, self._kills = renew, kills
        self._joining: list[SeatInThread] = []
        self._changing = threading.RLock()  # the members and those that join: two threads find losses

    def call(self, member: SeatInThread, method: str, *arguments: Any) -> Future[Any]:
        if method == "turn" and self._kills and self._kills(arguments[0]):
            member.trouble, self._kills = "has died: it was killed, or crashed", None
        return super().call(member, method, *arguments)

    def alive(self) -> list[str]:
        return [member.name for member in self._members if not member.trouble]

    def kill(self, number: int) -> str:
        member = self._members[number]
        member.trouble = "has died: it was killed, or crashed"
        return member.name

    @property
    def joiners(self) -> int:  # type: ignore[override]
        return len(self._joining)

    def value(self, member: SeatInThread, promise: Future[Any]) -> Any:
        result = promise.result()
        if member.trouble:
            raise SamplerLost(f"{member.name} {member.trouble}")
        return result

    def drop(self, member: SeatInThread) -> None:
        with self._changing:
            if member not in self._members:
                return  # the other thread has found it, too
            super().drop(member)
            if self._renew:
                name = f"{member.name} again"
                self._joining.append(SeatInThread(name, self._renew(name), member.thread))

    def wait_for_joiner(self) -> None:
        with self._changing:
            for member in [each for each in self._members if each.trouble]:
                self.drop(member)
            if not self._joining:
                raise RunStopped("no sampler is left, and none is being started")

    def publish(self, policy: TrainEngine) -> Served:
        with self._changing:
            if not self.alive():
                self.wait_for_joiner()
            self._members += self._joining
            self._joining.clear()
        return super().publish(policy)
