"""A crew of samplers in workers of Ray: a lost one is started again beside the others, and joins them with the next weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from posttrain.backends.runtime.ray.cluster import RayArray, WorkerDied
from posttrain.backends.runtime.ray.packed import Packed
from posttrain.backends.runtime.ray.rollout import RemoteRollout
from posttrain.backends.runtime.ray.sync import SeparateSync
from posttrain.backends.runtime.ray.watch import Member, WorkerLost
from posttrain.backends.runtime.ray.worker import Failure
from posttrain.errors import PosttrainError, RunStopped
from posttrain.interfaces.crew import SamplerLost
from posttrain.interfaces.rollout_engine import Served
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.records.notices import Notices

LOOK_S = 0.2  # between two looks for a sampler that starts
RENEWALS = 16  # at a time: a lost machine had several samplers


class RayCrew:
    """See interfaces.crew.Crew.

    Args: renew starts another worker in a lost one's place, and returns it once its model is loaded; start_timeout_s for that.
    """

    def __init__(
        self,
        rollout: RemoteRollout,
        sync: SeparateSync,
        renew: Callable[[Member], Member],
        notices: Notices,
        *,
        resumes: bool,
        start_timeout_s: float,
    ):
        self.resumes = resumes
        self._rollout, self._sync, self._renew, self._notices = rollout, sync, renew, notices
        self._workers = rollout.workers
        self._start_timeout_s = start_timeout_s
        self._beside: dict[Member, tuple[Any, Any]] = {}  # promises of the turn under way and of the arrays beside it
        self._joining: list[Member] = []
        self._renewals = threading.Semaphore(RENEWALS)
        self._starting = 0  # samplers
        # Of the samplers' thread, the loop's and that of renewals: members, joining and starting change in it
        self._changing = threading.Lock()
        self._failure: PosttrainError | None = None  # of the last start

    def members(self) -> Sequence[Member]:
        return self._workers.members

    def call(self, member: Member, method: str, *arguments: Any) -> Any:
        if method != "turn":
            return self._workers.cluster.call(member.handle, "call", f"seat.{method}", True, *arguments)
        promise, beside = self._workers.cluster.call_for_two(member.handle, "call_beside", "turn", *arguments)
        self._beside[member] = promise, beside
        return promise

    def ready(self, promises: Collection[Any], timeout_s: float) -> Collection[Any]:
        return self._workers.cluster.ready(list(promises), timeout_s)

    def value(self, member: Member, promise: Any) -> Any:
        try:
            result = self._workers.cluster.value(promise, self._workers.timeout_s)
        except WorkerDied as died:
            self._workers.watch.found_dead(member, died)
            raise SamplerLost(str(member.lost())) from None
        except TimeoutError:
            raise RunStopped(f"{member.name} gave no answer within {self._workers.timeout_s:g} s") from None
        if isinstance(result, Failure):
            raise result.error(member.name)
        if not isinstance(result, Packed):
            return result
        turn, beside = self._beside.pop(member)
        assert turn == promise, "a sampler takes one turn at a time"
        return result.joined(partial(RayArray, beside)).unpacked()

    def hurry(self, member: Member) -> None:
        self._workers.cluster.call(member.handle, "call_aside", "seat.hurry")

    def drop(self, member: Member) -> None:
        with self._changing:
            if member not in self._workers.members:
                return  # a validation has replaced it, or it was found by the other thread
            self._workers.members.remove(member)
            self._beside.pop(member, None)
            self._starting += 1
        self._notices.add(f"{member.lost()}\nIts groups go on elsewhere, and it is started again")
        threading.Thread(target=self._start_again, args=(member,), name="sampler-renewal", daemon=True).start()

    @property
    def joiners(self) -> int:
        return len(self._joining)

    def wait_for_joiner(self) -> None:
        for member in [each for each in self._workers.members if each.trouble]:
            self.drop(member)
        until = time.monotonic() + self._start_timeout_s
        while True:
            with self._changing:
                if self._joining:
                    return
                starting = self._starting
            if not starting:
                raise self._failure or RunStopped("no sampler is left, and none is being started")
            if time.monotonic() > until:
                raise RunStopped(
                    f"no sampler is left, and none has started within {self._start_timeout_s:g} s (placement.start_timeout_s)"
                )
            time.sleep(LOOK_S)

    def publish(self, policy: TrainEngine) -> Served:
        version = policy.version
        while True:
            with self._changing:
                self._workers.members += self._joining
                self._joining.clear()
            present = [each for each in self._workers.members if not each.trouble]
            if not present:
                self.wait_for_joiner()
                continue
            try:
                served = self._sync.send(present, version)
            except WorkerLost as loss:
                if loss.member.vital:
                    raise
                continue
            self._rollout.weights_changed(version)
            return served

    def _start_again(self, lost: Member) -> None:
        """Start a lost sampler again, beside others."""
        started: list[Member] = []
        with self._renewals:
            try:
                started = [self._renew(lost)]
            except Exception as error:  # noqa: BLE001  # a thread of its own: it is reported, and others are still started
                self._failure = error if isinstance(error, PosttrainError) else RunStopped(f"{lost.name}: {error!r}")
                self._notices.add(f"{lost.name} could not be started again: {error}")
        with self._changing:
            self._joining += started
            self._starting -= 1
