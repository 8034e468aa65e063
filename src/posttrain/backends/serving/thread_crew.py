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
from posttrain.interfaces.weight_sync import WeightSync
from posttrain.registry import ROLLOUT_ENGINES
from posttrain.steps.seat import StreamSeat


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

    def hurry(self, member: SeatInThread) -> None:
        member.seat.hurry()

    def drop(self, member: SeatInThread) -> None:
        self._members.remove(member)

    def wait_for_joiner(self) -> None:
        raise RunStopped("no sampler is left, and none is being started")

    def publish(self, policy: TrainEngine) -> Served:
        return self._send(policy)


def crew_of_servers(engine: str, sampler: Any, sync: WeightSync) -> ThreadCrew:
    """A crew of one member, for an engine with servers of its own that shares requests out among them."""

    def send(policy: TrainEngine) -> Served:
        sync.publish(policy, sampler)
        return Served(sampler.version, sampler.content_hash, sync.sent_bytes)

    resumes = ROLLOUT_ENGINES.facts(engine).resumes_responses
    return ThreadCrew({engine: StreamSeat(sampler, resumes=resumes)}, send, resumes=resumes)
