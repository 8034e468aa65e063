"""A crew of samplers in threads of this process: servers that run already, or modules of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from posttrain.errors import RunStopped
from posttrain.interfaces.crew import Seat
from posttrain.interfaces.rollout_engine import Served
from posttrain.interfaces.train_engine import TrainEngine


@dataclass(eq=False)
class SeatInThread:
    """See interfaces.crew.Member."""

    name: str
    seat: Seat
    thread: ThreadPoolExecutor
    trouble: str | None = None  # an error of its engine ends the run, so there is none


class ThreadCrew:
    """See interfaces.crew.Crew. No sampler is lost or joins: an error of one is raised.

    Args: seats by name; send(policy), which gives all of them the policy's weights and returns what they have echoed.
    """

    joiners = 0

    def __init__(self, seats: Mapping[str, Seat], send: Callable[[TrainEngine], Served], *, resumes: bool):
        self.resumes = resumes
        self._send = send
        self._members = [
            SeatInThread(name, seat, ThreadPoolExecutor(1, thread_name_prefix=name)) for name, seat in seats.items()
        ]

    def members(self) -> Sequence[SeatInThread]:
        return self._members

    def call(self, member: SeatInThread, method: str, *arguments: Any) -> Future[Any]:
        return member.thread.submit(getattr(member.seat, method), *arguments)

    def ready(self, promises: Collection[Any], timeout_s: float) -> Collection[Any]:
        return wait(promises, timeout_s, FIRST_COMPLETED).done

    def value(self, member: SeatInThread, promise: Any) -> Any:
        return promise.result()

    def drop(self, member: SeatInThread) -> None:
        self._members.remove(member)

    def wait_for_joiner(self) -> None:
        raise RunStopped("no sampler is left, and none is being started")

    def publish(self, policy: TrainEngine) -> Served:
        return self._send(policy)
