"""Assignment of conversations to the episodes of a run: a group takes those that their caller, or their task, put together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.interfaces.env import EnvSpec, Message


@dataclass(slots=True, eq=False)
class Place:
    """An episode of the run that waits for a conversation."""

    episode: str
    spec: EnvSpec
    seed: int
    conversations: int = 0  # that it was given to


@dataclass(slots=True, eq=False)
class Group:
    """The episodes of one prompt."""

    name: str
    free: list[Place] = field(default_factory=list)
    label: str = ""  # of the conversations that it takes; "": any, none has come yet
    last_used: float = 0.0  # when it got a conversation, or one of its conversations ended
    open: int = 0  # conversations that have not ended
    begun: int = 0  # conversations, ended or not


class Places:
    """The free places of all groups, oldest first. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def add(self, place: Place) -> None:
        name = place.episode.rpartition("/")[0]
        self._groups.setdefault(name, Group(name)).free.append(place)

    def take(self, label: str, now: float, count: int = 1) -> tuple[Group, list[Place]] | None:
        """Take places for conversations with this label: of the group that has it already, else of the oldest without one.

        Returns: None while no such group has so many.
        """
        groups = [group for group in self._groups.values() if len(group.free) >= count]
        same = [group for group in groups if group.label == label]
        new = [group for group in groups if not group.label]
        if not same and not new:
            return None
        group = (same or new)[0]
        return group, [_taken(group, label, now) for _ in range(count)]

    def take_any(self, now: float) -> tuple[Group, list[Place]] | None:
        """Take the oldest place, for a caller that plays what the run wants."""
        for group in self._groups.values():
            if group.free and (not group.label or group.label == f"row {group.name}"):
                return group, [_taken(group, f"row {group.name}", now)]
        return None

    def give_back(self, group: Group, place: Place, now: float) -> None:
        """Free the place of a conversation in which nothing was sampled."""
        group.free.insert(0, place)
        group.open -= 1
        group.begun -= 1
        group.last_used = now
        if not group.begun:
            group.label = ""

    def ended(self, group: Group, now: float) -> None:
        group.open -= 1
        group.last_used = now
        self._tidy(group)

    def drop(self, episode: str) -> None:
        """Forget the free place of an episode, if it is one."""
        for group in self.groups:
            group.free = [place for place in group.free if place.episode != episode]
            self._tidy(group)

    def unfilled(self, before: float) -> list[Place]:
        """Take the free places of groups that were begun and got no conversation since ``before``."""
        found = []
        for group in self.groups:
            if group.label and group.free and not group.open and group.last_used < before:
                found += group.free
                group.free = []
                self._tidy(group)
        return found

    def _tidy(self, group: Group) -> None:
        if not group.free and not group.open:
            self._groups.pop(group.name, None)


def _taken(group: Group, label: str, now: float) -> Place:
    group.label, group.last_used = label, now
    group.open += 1
    group.begun += 1
    place = group.free.pop(0)
    place.conversations += 1
    return place


def task_label(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]], prompt: str | Sequence[int] | None = None
) -> str:
    """Return a label that is equal for conversations that begin with the same messages and tools, or the same prompt of a
    completion: samples of one task."""
    said = [list(messages), list(tools)] if prompt is None else prompt
    begun = json.dumps(said, sort_keys=True, default=str, ensure_ascii=True)
    return f"task {hashlib.blake2b(begun.encode(), digest_size=12).hexdigest()}"
