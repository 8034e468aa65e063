"""Environments that play all episodes of a group in lockstep, in one process per group.

To the process a group is one episode: its action is a list of the actions of all copies, and its answer a message with an answer
for each of them. A group waits until all of its episodes have acted; different groups do not wait for each other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.backends.environments.make import INVALID, start_of, step_of
from posttrain.backends.environments.processes import ProcessHost, _Worker
from posttrain.interfaces.env import EnvEvent, EnvFailed, EnvSpec, EnvStart, EnvStep

COPIES, SEAT = "copies", "seat"  # settings of such an environment, which the host gives it


class SeatedHost(ProcessHost):
    """A ProcessHost whose processes have numbers: an episode of seat k is played in process k, modulo their number.

    An environment with random numbers of its own, which go on from episode to episode, then gives equal runs equal episodes.
    """

    def __init__(self, workers: int, timeout_s: float, *args: Any, **more: Any) -> None:
        super().__init__(workers, timeout_s, *args, **more)
        self._seats: dict[int, _Worker] = {}

    def _fill(self) -> None:
        waiting: deque[tuple[str, dict[str, Any], float]] = deque()
        while self._queue:
            queued = self._queue.popleft()
            seat = queued[1]["spec"]["settings"][SEAT] % self._most
            worker = self._seats.get(seat)
            if worker is None or worker not in self._workers:
                worker = self._seats[seat] = self._fork()
            if worker.episode is None:
                self._begin(worker, *queued)
            else:
                waiting.append(queued)
        self._queue = waiting


@dataclass(slots=True)
class _Group:
    """Episodes that are stepped together."""

    name: str
    spec: EnvSpec
    seed: int
    size: int
    episodes: list[str] = field(default_factory=list)  # in the order of the copies
    actions: dict[str, str] = field(default_factory=dict)  # of those that have acted
    open: set[str] = field(default_factory=set)  # those that still act
    begun: bool = False  # all have come, and the environment is starting
    waits: bool = False  # for the environment's answer


class GroupHost:
    """An EnvHost for environments that play in groups (facts: ``in_groups``).

    A group is ``sampling.samples_per_prompt`` episodes that are started one after the other, and the extra ones. Groups that
    are played at the same time have the seats 0, 1, 2 …
    """

    def __init__(self, host: SeatedHost) -> None:
        self._host = host
        self._groups: dict[str, _Group] = {}
        self._by_episode: dict[str, _Group] = {}
        self._filling: _Group | None = None
        self._seat = 0
        self._count = 0
        self._events: list[tuple[str, EnvEvent]] = []

    def load(self, names: Sequence[str]) -> dict[str, str]:
        return self._host.load(names)

    def start(self, episode: str, spec: EnvSpec, seed: int, saved: Any = None) -> None:
        group = self._filling
        if group is None:
            sampling = spec.sampling
            size = sampling.samples_per_prompt + sampling.extra_episodes if sampling else 1
            group = self._filling = _Group(f"group {self._count}", spec, seed, size)
            self._count += 1
        group.episodes.append(episode)
        group.open.add(episode)
        self._by_episode[episode] = group
        if len(group.episodes) == group.size:
            self._begin(group)

    def _begin(self, group: _Group) -> None:
        self._filling = None
        self._seat = self._seat if any(each.open for each in self._groups.values()) else 0
        settings = {**group.spec.settings, COPIES: len(group.episodes), SEAT: self._seat}
        self._seat += 1
        self._groups[group.name] = group
        group.begun = group.waits = True
        self._host.start(group.name, replace(group.spec, settings=settings), group.seed)

    def step(self, episode: str, action: str, cut: bool = False) -> None:
        group = self._by_episode[episode]
        group.actions[episode] = action
        self._go_on(group)

    def answer(
        self, episode: str, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int
    ) -> None:
        raise AssertionError("environments that play in groups ask for no turns")

    def _go_on(self, group: _Group) -> None:
        """Step the group when all that still act have acted; end it when none does."""
        if group.waits or not group.begun:
            return
        if not group.open:
            group.waits = True
            self._host.finish(group.name)
        elif all(each in group.actions for each in group.open):
            group.waits = True
            actions = [group.actions.get(each) if each in group.open else None for each in group.episodes]
            group.actions = {}
            self._host.step(group.name, json.dumps(actions))

    def finish(self, episode: str) -> None:
        self._events.append((episode, {}))
        self._leave(episode)

    def drop(self, episode: str, failed: EnvFailed | None = None) -> None:
        self._leave(episode)

    def _leave(self, episode: str) -> None:
        group = self._by_episode.pop(episode, None)
        if group is not None:
            group.open.discard(episode)
            group.actions.pop(episode, None)
            self._go_on(group)

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        if not self._events:
            if self._filling is not None:  # fewer episodes than a group has: they are one of their own
                self._begin(self._filling)
            for name, event in self._host.wait(timeout_s):
                self._take(self._groups[name], event)
        events, self._events = self._events, []
        return events

    def _take(self, group: _Group, event: EnvEvent) -> None:
        group.waits = False
        if isinstance(event, (EnvFailed, Mapping)):
            del self._groups[group.name]
            for episode in [each for each in group.episodes if each in group.open]:
                self._by_episode.pop(episode, None)
                lost = event if isinstance(event, EnvFailed) else EnvFailed(INVALID, "its group has ended")
                self._events.append((episode, lost))
            return
        assert isinstance(event, (EnvStart, EnvStep))
        answers = event.messages[0]["answers"]
        read = start_of if isinstance(event, EnvStart) else step_of
        for episode, answer in zip(group.episodes, answers, strict=True):
            if episode in group.open:
                found = read(answer)
                self._events.append((episode, found))
                if isinstance(found, EnvFailed):
                    self._by_episode.pop(episode, None)
                    group.open.discard(episode)
        self._go_on(group)

    def abandon(self) -> None:
        self._host.abandon()
        self._groups, self._by_episode, self._filling, self._events = {}, {}, None, []

    def close(self) -> None:
        self._host.close()
