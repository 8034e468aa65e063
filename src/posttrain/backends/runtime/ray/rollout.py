"""Sampling in workers: prompts are distributed, groups return as they are complete, and a lost sampler is replaced once.

Samplers with devices of their own may sample in another thread while the loop trains (interfaces.beside). The policy's workers
cannot send weights then, so the prompts of a lost sampler go to those that are left, and it is started again with the next
weights. When none is left, one is started at once, waits for these, and samples the rest with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from posttrain.algos.balancing import balanced_parts
from posttrain.backends.runtime.ray.cluster import RayArray, WorkerDied
from posttrain.backends.runtime.ray.kept_weights import hand_over, keep
from posttrain.backends.runtime.ray.lockstep import HeldCaches, LockstepStream
from posttrain.backends.runtime.ray.stream import RemoteStream
from posttrain.backends.runtime.ray.watch import Member
from posttrain.backends.runtime.ray.worker import Failure, PackedGroups, asked_prompts
from posttrain.backends.runtime.ray.worker_group import WorkerGroup
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens
from posttrain.records.notices import Notices
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, TrajectoryGroup

IN_FLIGHT_S = 30.0  # timeout for groups that a worker has announced and not delivered
LOOK_S = 0.1  # between two looks for weights


class RemoteRollout:
    """See interfaces.rollout_engine.RolloutEngine. A response depends on its id, the seed and the weights, and not on where it
    is sampled.

    Args: workers has a member per copy of the sampler; ``renew`` starts another worker in a lost one's place and gives it the
        policy's weights (with True), or leaves that to a sync that follows; None: the samplers are the trainers, without which
        nothing goes on; in_lockstep, streams are resumable and count passes (lockstep.LockstepStream), not seconds.
    """

    note = ""  # shown once, by the runtime

    def __init__(
        self,
        workers: WorkerGroup,
        notices: Notices,
        renew: Callable[[Member, bool], Member] | None,
        *,
        in_lockstep: bool = False,
    ):
        self.workers = workers
        self._in_lockstep, self._caches = in_lockstep, HeldCaches()
        self._notices = notices
        self._renew = renew
        self._version = 0
        self._calls = 0
        self._beside = False  # sampling is under way while the policy trains
        self._lost: list[Member] = []  # meanwhile, to be started again with the next weights
        self._needs_weights = threading.Event()
        self._left = threading.Event()

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        """See interfaces.beside.BesideTraining."""
        self._beside = True
        try:
            yield
        finally:
            self._beside = False
            self._left.clear()

    @property
    def needs_weights(self) -> bool:
        return self._needs_weights.is_set()

    @property
    def is_whole(self) -> bool:
        """True while no sampler is lost, and all have weights."""
        return not (self.needs_weights or self._lost or any(each.trouble for each in self.workers.members))

    def leave(self) -> None:
        self._left.set()

    def keep_weights(self, folder: Path) -> bool:
        return self.is_whole and keep(self.workers, folder, self._version)

    def take_kept(self, folder: Path) -> None:
        self.mend(send=True)
        self.weights_changed(hand_over(self.workers, folder))

    def check_left(self) -> None:
        """Raises: RunStopped when the loop has ended meanwhile; the loss of a trainer."""
        if self._left.is_set():
            raise RunStopped("the run has ended while it sampled")
        for member in self.workers.watch.members:
            if member.trouble and member.vital:
                raise member.lost()

    @property
    def version(self) -> int:
        return self._version

    def weights_changed(self, version: int) -> None:
        self._version = version
        self._needs_weights.clear()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        """See interfaces.rollout_engine. Raises: RunStopped when a trainer is lost, or a prompt's sampler a second time."""
        self.mend(send=True)
        self._calls += 1
        return _Sampling(self, prompts, sampling, self._calls).run(on_tokens, on_group)

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> RemoteStream | LockstepStream:
        """See interfaces.rollout_engine."""
        self.mend(send=True)
        if self._in_lockstep:
            return LockstepStream(self.workers, sampling, on_tokens, self._caches)
        return RemoteStream(
            self.workers, sampling, on_tokens, lambda lost: self.replace(lost, send=True), self.check_left
        )

    def mend(self, *, send: bool) -> None:
        """Replace samplers that were lost while idle; ``send`` gives the new ones the policy's weights."""
        if self._lost and not (send and self._beside):
            self.workers.members = sorted([*self.workers.members, *self._lost], key=_number)
            self._lost = []
        for member in list(self.workers.members):
            if member.trouble:
                self.replace(member, send=send)

    def replace(self, member: Member, *, send: bool) -> Member:
        """A sampler in the place of a lost one: a new one, or beside training one of those that are left.

        Raises: the member's loss, where it cannot be replaced.
        """
        loss, members = member.lost(), self.workers.members
        if self._renew is None:
            raise loss
        beside = send and self._beside
        if beside and (left := [each for each in members if not each.trouble]):
            members.remove(member)
            self._lost.append(member)
            self._notices.add(f"{loss}\nIts prompts go to {left[0].name}; it is started again with the next weights")
            return left[0]
        new = self._renew(member, send and not beside)
        members[members.index(member)] = new
        self._notices.add(f"{loss}\n{new.name} was started again")
        return self._with_weights(new) if beside else new

    def _with_weights(self, new: Member) -> Member:
        """Wait until the step that trains has ended, and the only sampler has the weights after it. Returns: the one that has
        them, which may be another one. Raises: as ``check_left``."""
        at = self.workers.members.index(new)
        self._needs_weights.set()
        while self._needs_weights.is_set():
            self.check_left()
            time.sleep(LOOK_S)
        return self.workers.members[at]


def _number(member: Member) -> tuple[int, str]:
    """The order of samplers: "rollout rank 2" before "rollout rank 10"."""
    return len(member.name), member.name


class _Sampling:
    """One call of ``generate``."""

    def __init__(self, rollout: RemoteRollout, prompts: Sequence[Prompt], sampling: SamplingParams, call: int):
        self.rollout, self.workers = rollout, rollout.workers
        self.prompts, self.sampling, self.call = prompts, sampling, call
        self.groups: dict[int, TrajectoryGroup] = {}
        self.missing: dict[Member, set[int]] = {}  # numbers of the prompts a member has not returned yet
        self.promises: list[tuple[Member, Any, Any]] = []  # of groups, and of the arrays beside them
        self.again: set[int] = set()  # prompts that were sent a second time

    def run(self, on_tokens: OnTokens | None, on_group: OnGroup | None) -> list[TrajectoryGroup]:
        loads = [
            len(prompt.token_ids) + self.sampling.samples_per_prompt * self.sampling.max_response_tokens
            for prompt in self.prompts
        ]
        members = self.workers.members[: len(self.prompts)]
        for member, numbers in zip(members, balanced_parts(loads, len(members)), strict=True):
            self._ask(member, sorted(numbers))
        begun = time.monotonic()
        quiet_since: float | None = None
        try:
            while len(self.groups) < len(self.prompts):
                self._hear(on_tokens, on_group)
                for member in list(self.missing):
                    if member.trouble and self.missing[member]:
                        self._ask_another(member)
                self.rollout.check_left()
                now = time.monotonic()
                quiet_since = None if self.promises else quiet_since or now
                if now - begun > self.workers.timeout_s or (quiet_since and now - quiet_since > IN_FLIGHT_S):
                    late = ", ".join(member.name for member, numbers in self.missing.items() if numbers)
                    raise RunStopped(f"sampling: {late} did not end in time (placement.call_timeout_s)")
        except BaseException:  # also a signal: these samples are no longer needed
            for member, *_ in self.promises:
                self.workers.cluster.call(member.handle, "give_up")
            raise
        return [self.groups[number] for number in range(len(self.prompts))]

    def _ask(self, member: Member, numbers: list[int]) -> None:
        plain = asked_prompts(numbers, [self.prompts[number] for number in numbers])
        if member not in self.missing:
            member.take()  # discard what is left of an abandoned call
        self.missing.setdefault(member, set()).update(numbers)
        asked = self.workers.cluster.call_for_two(
            member.handle, "call_beside", "generate", self.call, plain, self.sampling
        )
        self.promises.append((member, *asked))

    def _ask_another(self, lost: Member) -> None:
        """Raises: RunStopped when a prompt has lost its sampler before, or the lost worker cannot be replaced."""
        numbers = sorted(self.missing.pop(lost))
        self.promises = [each for each in self.promises if each[0] is not lost]
        if twice := self.again & set(numbers):
            loss = lost.lost()
            named = ", ".join(self.prompts[number].prompt_id for number in sorted(twice)[:3])
            raise RunStopped(
                f"{loss}\nIt is the second worker lost while it sampled {named}: these are not tried again"
            )
        self.again |= set(numbers)
        self._ask(self.rollout.replace(lost, send=True), numbers)

    def _hear(self, on_tokens: OnTokens | None, on_group: OnGroup | None) -> None:
        """Process the messages that have arrived: tokens, groups, and the ends of calls."""
        promises = [promise for _, promise, _ in self.promises]
        kept = set(self.workers.cluster.ready(promises, 0.1, whole=True) if promises else ())
        if not self.promises:
            time.sleep(0.05)
        ended = [each for each in self.promises if each[1] in kept]
        self.promises = [each for each in self.promises if each[1] not in kept]
        for member, promise, beside in ended:
            try:
                result = self.workers.cluster.value(promise, self.workers.timeout_s)
            except WorkerDied as died:
                self.workers.watch.found_dead(member, died)
                continue
            if isinstance(result, Failure):
                raise result.error(member.name)
            self._take(member, [result.joined(partial(RayArray, beside))] if result else [], on_group)
        for member in list(self.missing):
            tokens, groups = member.take()
            if tokens and on_tokens:
                on_tokens(tokens)
            self._take(member, groups, on_group)

    def _take(self, member: Member, packed: Sequence[PackedGroups], on_group: OnGroup | None) -> None:
        for (call, number), responses in chain.from_iterable(each.unpacked().each() for each in packed):
            if call != self.call or number in self.groups:
                continue
            self.groups[number] = TrajectoryGroup(prompt=self.prompts[number], trajectories=responses)
            self.missing[member].discard(number)
            if on_group:
                on_group(self.groups[number])
