"""Interface of a crew: samplers with weights of their own, which work while the trainer does, and may come and go."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import Request, Served
from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished

if TYPE_CHECKING:  # a seat needs no torch
    from posttrain.interfaces.train_engine import TrainEngine


class SamplerLost(RunStopped):
    """A sampler of a crew is dead or stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The work of a sampler's next turn."""

    sampling: SamplingParams  # of the stream, should it have to be opened
    new: tuple[Request, ...] = ()
    cancelled: tuple[str, ...] = ()  # sample ids
    timeout_s: float
    until_pass: int | None = (
        None  # the turn ends after this pass, counted from the sampler's start; None: by time alone
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """A sampler's turn. Samplers whose engine does not count passes are always at pass 0."""

    begun: int  # passes before the turn
    passes: int  # after it
    ended: tuple[Trajectory, ...]
    grown: tuple[Unfinished, ...]  # unfinished responses with the tokens since their last report; their spans are whole
    again: tuple[str, ...] = ()  # sample ids of these that come with all their tokens, in the place of earlier reports
    tokens: int  # sampled in the turn
    busy_s: float  # in which it had requests


class Member(Hashable, Protocol):
    """A sampler of a crew."""

    @property
    def name(self) -> str: ...

    @property
    def trouble(self) -> str | None:
        """Return the reason why it is lost; None while it is not."""
        ...


class Seat(Protocol):
    """The side of the sampler, whose methods a crew calls by name (steps.seat)."""

    def turn(self, order: Order) -> Turned: ...

    def rest(self) -> int:
        """Stop between two tokens, so that weights may change or others sample. The next turn continues every response from
        the tokens that it has. Returns: the passes so far."""
        ...

    def leave(self) -> None:
        """Forget all requests."""
        ...

    def hurry(self) -> None:
        """End the turn under way soon, or the next one; called from another thread."""
        ...


class Crew(Protocol):
    """Samplers and the way of the weights to them. For one thread at a time, but for ``publish`` and ``wait_for_joiners``."""

    @property
    def resumes(self) -> bool:
        """True when responses continue after a rest; otherwise they have to end before it."""
        ...

    def members(self) -> Sequence[Any]:
        """Return the samplers that have been given weights (Member), lost ones included until they are dropped."""
        ...

    def call(self, member: Any, method: str, *arguments: Any) -> Any:
        """Call a method of a sampler's Seat. Returns at once; a promise."""
        ...

    def ready(self, promises: Collection[Any], timeout_s: float) -> Collection[Any]:
        """Return the promises that are fulfilled or failed; waits at most so long for the first one."""
        ...

    def value(self, member: Any, promise: Any) -> Any:
        """Return the result of a call. Raises: SamplerLost, after which the member is in trouble; what the call raised."""
        ...

    def hurry(self, member: Any) -> None:
        """Have a sampler end its turn soon (Seat); returns at once."""
        ...

    def drop(self, member: Any) -> None:
        """Drop a lost sampler and begin to start another one in its place, where that is possible; returns at once."""
        ...

    @property
    def joiners(self) -> int:
        """Samplers that have started and wait for weights."""
        ...

    def wait_for_joiner(self) -> None:
        """Wait until a sampler has started; lost members are dropped first. Raises: RunStopped when none is being started, or the
        last one did not start."""
        ...

    def publish(self, policy: TrainEngine) -> Served:
        """Give all members and joiners, which become members, the policy's weights. Returns the version and hash that each of
        them has echoed: nothing is sampled before that. Samplers that are lost meanwhile are in trouble.

        Raises: RunStopped when one serves other weights.
        """
        ...
