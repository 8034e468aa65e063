"""The recorded orders of samplers (schedule.jsonl), each at a pass of its sampler, to be given again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["order", "rest", "lost"]


class Awaited(NamedTuple):
    """The choice of groups that came next when something was recorded."""

    step: int
    number: int  # of the step's choices, from 0; after the last one: how many it made


class Place(NamedTuple):
    """An order of a sampler."""

    sampler: int
    number: int  # among the orders of all samplers


@dataclass(frozen=True, slots=True)
class Due:
    """An order to a sampler, or the end of its work."""

    kind: Kind
    at: int  # after this pass
    sent: tuple[str, ...] = ()  # requests, by sample id
    cancelled: tuple[str, ...] = ()
    awaited: Awaited | None = None  # of a rest
    number: int = 0  # among the orders of all samplers
    behind: tuple[Place, ...] = ()  # orders that sent the same requests before


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

    def is_past(self, number: int) -> bool:
        """Tell whether an order of this sampler has been given."""
        return not any(due.kind == "order" and due.number <= number for due in self._orders)

    def rests(self, awaited: Awaited) -> bool:
        """Tell whether a rest is still to come in the wait for this choice."""
        return any(due.kind == "rest" and due.awaited == awaited for due in self._orders)

    def follow(self, kind: Kind) -> None:
        """The next order has been given."""
        assert self._orders and self._orders[0].kind == kind, "orders are followed in their order"
        self._orders.popleft()


class Joining(NamedTuple):
    """A sampler that joined."""

    version: int  # of the weights that it got
    awaited: Awaited
    rested: Mapping[int, int]  # passes of the samplers that rested for these weights, by number


@dataclass(frozen=True, slots=True)
class Passes:
    """The orders of all samplers, by their numbers in the order of joining."""

    orders: Mapping[int, list[Due]]
    joined: Mapping[int, Joining]  # by number
    synced: frozenset[int]  # steps at whose end the samplers got new weights
    most: int = 0  # samplers at a time

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Passes:
        orders: dict[int, list[Due]] = {}
        joined: dict[int, Joining] = {}
        synced = set()
        choices = Counter[int]()  # made so far, by step
        latest: dict[str, Place] = {}  # by request
        rested: dict[int, int] = {}  # passes, by sampler, since weights were last sent
        now = most = 0
        for number, event in enumerate(events):
            awaited = Awaited(event["step"], choices[event["step"]])
            match event["event"]:
                case "joined":
                    joined[event["sampler"]] = Joining(event["version"], awaited, dict(rested))
                    orders[event["sampler"]] = []
                    now += 1
                    most = max(most, now)
                case "order":
                    sent, place = tuple(event["sent"]), Place(event["sampler"], number)
                    behind = tuple(dict.fromkeys(latest[name] for name in sent if name in latest))
                    latest |= dict.fromkeys(sent, place)
                    cancelled = tuple(event["cancelled"])
                    due = Due("order", event["pass"], sent, cancelled, number=number, behind=behind)
                    orders[event["sampler"]].append(due)
                case "synced":
                    synced.add(event["step"])
                case "ready":
                    choices[event["step"]] += 1
                case "rest":
                    orders[event["sampler"]].append(Due("rest", event["pass"], awaited=awaited))
                    rested[event["sampler"]] = event["pass"]
                case "weights":
                    rested.clear()
                case "lost":
                    orders[event["sampler"]].append(Due("lost", event["pass"]))
                    now -= 1
        return cls(orders, joined, frozenset(synced), most)

    def post(self, number: int) -> PostScript:
        """The orders of a sampler; none for one that the recorded run did not have."""
        return PostScript(self.orders.get(number, []))
