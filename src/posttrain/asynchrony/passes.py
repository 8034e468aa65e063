"""The recorded orders of samplers (schedule.jsonl), each at a pass of its sampler, to be given again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["order", "rest", "lost"]


@dataclass(frozen=True, slots=True)
class Due:
    """An order to a sampler, or the end of its work."""

    kind: Kind
    at: int  # after this pass
    sent: tuple[str, ...] = ()  # requests, by sample id
    cancelled: tuple[str, ...] = ()


class PostScript:
    """The orders of one sampler."""

    def __init__(self, orders: Iterable[Due]):
        self._orders = deque(orders)

    @property
    def until(self) -> int | None:
        """The pass after which it gets its next order; None: there is none."""
        return self._orders[0].at if self._orders else None

    def due(self, passes: int) -> Due | None:
        """The next order, when the sampler has come to its pass."""
        return self._orders[0] if self._orders and self._orders[0].at <= passes else None

    def follow(self, kind: Kind) -> None:
        """The next order has been given."""
        assert self._orders and self._orders[0].kind == kind, "orders are followed in their order"
        self._orders.popleft()


@dataclass(frozen=True, slots=True)
class Passes:
    """The orders of all samplers, by their numbers in the order of joining."""

    orders: Mapping[int, list[Due]]
    joined: Mapping[int, int]  # with which version of the weights
    synced: frozenset[int]  # steps at whose end the samplers got new weights
    most: int = 0  # samplers at a time

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Passes:
        orders: dict[int, list[Due]] = {}
        joined: dict[int, int] = {}
        synced = set()
        now = most = 0
        for event in events:
            match event["event"]:
                case "joined":
                    orders[event["sampler"]], joined[event["sampler"]] = [], event["version"]
                    now += 1
                    most = max(most, now)
                case "order":
                    due = Due("order", event["pass"], tuple(event["sent"]), tuple(event["cancelled"]))
                    orders[event["sampler"]].append(due)
                case "synced":
                    synced.add(event["step"])
                case "rest" | "lost":
                    orders[event["sampler"]].append(Due(event["event"], event["pass"]))
                    now -= event["event"] == "lost"
        return cls(orders, joined, frozenset(synced), most)

    def post(self, number: int) -> PostScript:
        """The orders of a sampler; none for one that the recorded run did not have."""
        return PostScript(self.orders.get(number, []))
