"""Responses and episodes whose sampling lasts over several steps: suspended between two tokens, resumed under newer weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from posttrain.interfaces.rollout_engine import Request, RequestStream, ResumableStream
from posttrain.records.prompts import Prompt
from posttrain.records.saved_groups import unfinished_from_plain, unfinished_to_plain
from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished

PASS_S = 0.5  # of sampling, before deadlines are looked at


class Place(NamedTuple):
    """A sample of a group."""

    serial: int  # of the group
    number: int

    def __str__(self) -> str:
        return f"{self.serial}/{self.number}"


@dataclass(frozen=True, slots=True)
class Cut:
    """A sample that was suspended in this turn, after so many of its tokens."""

    place: Place
    turn: int
    tokens: int


class InFlight(Protocol):
    """Samples that have begun and not ended."""

    waits: bool  # for environments, which end samples without the sampler
    follows: bool  # recorded decisions are made again

    @property
    def samples(self) -> bool:
        """True while the sampler has a request: otherwise only environments are at work."""
        ...

    @property
    def requests(self) -> int:
        """Requests that the sampler has, or gets with the next poll."""
        ...

    def begin(self, place: Place, prompt: Prompt, sampling: SamplingParams) -> None:
        """Begin a sample; ``sampling.seed`` and the sample's name decide its random numbers."""
        ...

    def resume(self) -> None:
        """Continue everything that was begun or suspended, with the next poll of a new stream."""
        ...

    def poll(self, stream: RequestStream) -> list[tuple[Place, Trajectory]]:
        """Sample for a while. Returns: what has ended."""
        ...

    def suspend(self, stream: ResumableStream) -> list[Cut]:
        """Stop sampling; tokens stay."""
        ...

    def keep(self, progress: Unfinished) -> None:
        """Keep the tokens of a request that is being sampled; no-op for an unknown one."""
        ...

    def drop(self, serial: int) -> int:
        """Drop the samples of a group. Returns: their tokens."""
        ...

    def snapshot(self) -> Any: ...

    def go_back(self, snapshot: Any) -> None: ...

    def state(self) -> dict[str, Any]:
        """Plain values from which ``restore`` continues, as far as that is possible."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the samples that begin from now on from where they were."""
        ...

    def began_again(self, serial: int) -> bool:
        """Return True when a sample of a group could not be continued after ``restore``."""
        ...


class Responses:
    """Single responses: between two steps each is a request with the tokens that it has."""

    waits = False

    def __init__(self, *, keeps_cache: bool = False) -> None:
        self.follows = False
        self._keeps_cache = keeps_cache  # of what is suspended, although newer weights continue it
        self._requests: dict[Place, Request] = {}
        self._new: list[Place] = []  # not submitted
        self._submitted: set[Place] = set()
        self._restored: dict[Place, Unfinished] = {}  # of samples that have not begun yet
        self._given: list[tuple[Place, Trajectory]] = []  # made before

    @property
    def samples(self) -> bool:
        return bool(self._new or self._submitted)

    @property
    def requests(self) -> int:
        return len(self._requests)

    def begin(self, place: Place, prompt: Prompt, sampling: SamplingParams) -> None:
        self._requests[place] = Request(
            str(place),
            prompt.token_ids,
            sampling.max_response_tokens,
            images=prompt.images,
            seed=sampling.seed,
            draws_as=f"{prompt.prompt_id}/{place.number}",
            begun=self._restored.pop(place, None),
        )
        self._new.append(place)

    def give(self, place: Place, trajectory: Trajectory) -> None:
        """Take in a response that was made before; the next poll returns it."""
        self._given.append((place, trajectory))

    def resume(self) -> None:
        self._new = sorted(self._requests)

    def poll(self, stream: RequestStream) -> list[tuple[Place, Trajectory]]:
        stream.submit([self._requests[place] for place in self._new])
        self._submitted |= set(self._new)
        self._new = []
        ended, self._given = self._given, []
        if ended:
            return ended
        for response in stream.wait(PASS_S):
            place = place_of(response.sample_id)
            self._submitted.discard(place)
            request = self._requests.pop(place)
            ended.append((place, replace(response, sample_id=request.draw_name)))
        return ended

    def suspend(self, stream: ResumableStream) -> list[Cut]:
        cuts = []
        for each in stream.take_back(keep_cache=self._keeps_cache):
            place = place_of(each.sample_id)
            if each.token_ids:
                self._requests[place] = replace(self._requests[place], begun=each)
            cuts.append(Cut(place, 0, len(each.token_ids)))
        self._submitted.clear()
        return cuts

    def keep(self, progress: Unfinished) -> None:
        place = place_of(progress.sample_id)
        if place in self._requests:
            self._requests[place] = replace(self._requests[place], begun=progress)

    def drop(self, serial: int) -> int:
        gone = [place for place in self._requests if place.serial == serial]
        requests = [self._requests.pop(place) for place in gone]
        self._given = [each for each in self._given if each[0].serial != serial]
        return sum(len(each.begun.token_ids) for each in requests if each.begun)

    def snapshot(self) -> tuple[dict[Place, Request], list[tuple[Place, Trajectory]]]:
        return dict(self._requests), list(self._given)

    def go_back(self, snapshot: tuple[dict[Place, Request], list[tuple[Place, Trajectory]]]) -> None:
        self._requests, self._given, self._new = dict(snapshot[0]), list(snapshot[1]), []

    def state(self) -> dict[str, Any]:
        return {str(at): unfinished_to_plain(each.begun) for at, each in self._requests.items() if each.begun}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._restored = {place_of(name): unfinished_from_plain(begun) for name, begun in state.items()}

    def began_again(self, serial: int) -> bool:
        return False


def place_of(name: str) -> Place:
    serial, _, number = name.partition("/")
    return Place(int(serial), int(number))
