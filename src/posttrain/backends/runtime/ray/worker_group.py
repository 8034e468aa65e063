"""The workers of a group, which do everything together, as the driver calls them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.backends.runtime.ray.answers import whole_of
from posttrain.backends.runtime.ray.cluster import Cluster
from posttrain.backends.runtime.ray.shelf import Shelf
from posttrain.backends.runtime.ray.watch import Member, Watch


@dataclass(slots=True, eq=False)
class WorkerGroup:
    """Members in the order of their ranks."""

    cluster: Cluster
    watch: Watch
    members: list[Member]
    timeout_s: float  # of one call
    shelf: Shelf  # of all groups of the run
    # Held during a call: one of another thread waits for its end, because all ranks must have calls in the same order
    turn: threading.RLock = field(default_factory=threading.RLock)

    def call(self, method: str, *arguments: Any, what: str = "") -> Any:
        """Call a method of every rank's roles with the same arguments; the result of rank 0.

        Large arguments are given as promises (``shelf``), so that they travel once per node.
        """
        with self.turn:
            promises = {
                member: self.cluster.call(member.handle, "call", method, rank == 0, *arguments)
                for rank, member in enumerate(self.members)
            }
            return self.watch.wait(promises, what or method, self.timeout_s)[self.members[0]]

    def answer(self, method: str, *arguments: Any, what: str = "", moved: Callable[[], bool] | None = None) -> Any:
        """The same for a method that answers in parts (``answers``); the whole result. Args: moved, see Watch.wait."""
        with self.turn:
            promises = {
                member: self.cluster.call(member.handle, "call", method, True, *arguments) for member in self.members
            }
            found = self.watch.wait(promises, what or method, self.timeout_s, moved=moved)
        return whole_of([found[member] for member in self.members])

    def each(self, method: str, *arguments: Any, what: str = "") -> list[Any]:
        """The same; the result of every rank."""
        return self.scatter(method, [arguments] * len(self.members), what=what)

    def scatter(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        what: str = "",
        on_round: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Call a method of the first ranks' roles, each with its own arguments; what each of them returns."""
        with self.turn:
            promises = {
                member: self.cluster.call(member.handle, "call", method, True, *its)
                for member, its in zip(self.members, arguments, strict=False)
            }
            results = self.watch.wait(promises, what or method, self.timeout_s, on_round)
        return [results[member] for member in self.members[: len(arguments)]]

    def each_aside(self, method: str, *arguments: Any, what: str = "") -> None:
        """Call a method of every rank's roles while it may be doing other work."""
        promises = {
            member: self.cluster.call(member.handle, "call_aside", method, *arguments) for member in self.members
        }
        self.watch.wait(promises, what or method, self.timeout_s)
