"""A sampler's place in a fleet, and how long it works between two orders."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.asynchrony.passes import PostScript
from posttrain.interfaces.rollout_engine import Request
from posttrain.records.stored_rows import lengthened
from posttrain.records.trajectories import Unfinished

TURN_S = 0.1  # for which a sampler works before it looks for new requests; longer where they are many
SHARE = 0.2  # of a core that orders and answers of all samplers may take in the driver
LONGEST_TURN_S = 30.0
MEMORY = 0.99  # of what turns have cost, from one look to the next


@dataclass(slots=True, eq=False)
class Post:
    """A sampler's place in the fleet."""

    number: int  # in the order of joining
    member: Any
    passes: int = 0
    asked: dict[str, Request] = field(default_factory=dict)  # under way there, by sample id
    new: list[Request] = field(default_factory=list)  # of these, the ones that were not sent yet
    cancelled: list[str] = field(default_factory=list)
    turn: Any = None  # promise of a Turned
    script: PostScript | None = None  # recorded orders that are given again


class TurnLength:
    """The seconds of a turn, so that the turns of all samplers cost the driver a share of its time, however many there are."""

    def __init__(self) -> None:
        self._cpu_s = self._turns = 0.0

    def note(self, cpu_s: float, turns: int) -> None:
        """Count turns, with the CPU seconds of the thread of the samplers that they took."""
        self._cpu_s = MEMORY * self._cpu_s + cpu_s
        self._turns = MEMORY * self._turns + turns

    def of(self, samplers: int) -> float:
        each_s = self._cpu_s / self._turns if self._turns >= 1.0 else 0.0
        return min(max(TURN_S, samplers * each_s / SHARE), LONGEST_TURN_S)


def longer(before: Unfinished | None, grown: Unfinished) -> Unfinished:
    """A response with the tokens that were reported since."""
    if before is None:
        return grown
    return replace(
        grown,
        token_ids=lengthened(before.token_ids, grown.token_ids),
        logprobs=lengthened(before.logprobs, grown.logprobs),
    )
