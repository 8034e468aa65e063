"""Responses and episodes whose sampling lasts over several steps: suspended between two tokens, resumed under newer weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from posttrain.errors import DataError
from posttrain.interfaces.env import EnvAsk, EnvEvent, EnvFailed, EnvStart, EnvStep, EnvWithdrawn
from posttrain.interfaces.rollout_engine import Request, ResumableStream
from posttrain.interfaces.worlds import Worlds
from posttrain.records.prompts import Prompt
from posttrain.records.saved_groups import unfinished_from_plain, unfinished_to_plain
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory
from posttrain.steps.conversations import Conversations
from posttrain.steps.episode import TEMPLATE, Episode, EpisodeLost
from posttrain.steps.play import seed_of

PASS_S = 0.5  # of sampling, before deadlines are looked at
TURN_S = 0.02  # of sampling, before environments are polled again


class Place(NamedTuple):
    """A sample of a group."""

    serial: int  # of the group
    number: int

    def __str__(self) -> str:
        return f"{self.serial}/{self.number}"


@dataclass(frozen=True, slots=True)
class Cut:
    """A response that was suspended after so many tokens."""

    place: Place
    tokens: int


class InFlight(Protocol):
    """Samples that have begun and not ended."""

    def begin(self, place: Place, prompt: Prompt, sampling: SamplingParams) -> None:
        """Begin a sample; ``sampling.seed`` and the sample's name decide its random numbers."""
        ...

    def resume(self, stream: ResumableStream) -> None:
        """Continue everything that was begun or suspended, in a new stream."""
        ...

    def poll(self, stream: ResumableStream) -> list[tuple[Place, Trajectory]]:
        """Sample for a while. Returns: what has ended."""
        ...

    def suspend(self, stream: ResumableStream) -> list[Cut]:
        """Stop sampling; tokens stay."""
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
        """Continue the samples that have begun again from where they were."""
        ...


class Responses:
    """Single responses: between two steps each is a request with the tokens that it has."""

    def __init__(self) -> None:
        self._requests: dict[Place, Request] = {}
        self._new: list[Place] = []  # not submitted

    def begin(self, place: Place, prompt: Prompt, sampling: SamplingParams) -> None:
        self._requests[place] = Request(
            str(place),
            prompt.token_ids,
            sampling.max_response_tokens,
            images=prompt.images,
            seed=sampling.seed,
            draws_as=f"{prompt.prompt_id}/{place.number}",
        )
        self._new.append(place)

    def resume(self, stream: ResumableStream) -> None:
        self._new = sorted(self._requests)

    def poll(self, stream: ResumableStream) -> list[tuple[Place, Trajectory]]:
        stream.submit([self._requests[place] for place in self._new])
        self._new = []
        ended = []
        for response in stream.wait(PASS_S):
            place = _place(response.sample_id)
            request = self._requests.pop(place)
            ended.append((place, replace(response, sample_id=request.draw_name)))
        return ended

    def suspend(self, stream: ResumableStream) -> list[Cut]:
        cuts = []
        for each in stream.take_back():
            place = _place(each.sample_id)
            if each.token_ids:
                self._requests[place] = replace(self._requests[place], begun=each)
            cuts.append(Cut(place, len(each.token_ids)))
        return cuts

    def drop(self, serial: int) -> int:
        gone = [place for place in self._requests if place.serial == serial]
        requests = [self._requests.pop(place) for place in gone]
        return sum(len(each.begun.token_ids) for each in requests if each.begun)

    def snapshot(self) -> dict[Place, Request]:
        return dict(self._requests)

    def go_back(self, snapshot: dict[Place, Request]) -> None:
        self._requests, self._new = dict(snapshot), []

    def state(self) -> dict[str, Any]:
        return {str(at): unfinished_to_plain(each.begun) for at, each in self._requests.items() if each.begun}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, begun in state.items():
            place = _place(name)
            self._requests[place] = replace(self._requests[place], begun=unfinished_from_plain(begun))


class Episodes:
    """Episodes in environments, which go on in their processes while a step trains. A turn that is suspended keeps its tokens.

    Environments cannot be saved: a resumed run begins the episodes that had not ended again.
    """

    def __init__(self, worlds: Worlds, on_answer: Callable[[], None] = lambda: None):
        self.on_answer = on_answer  # called when an environment has answered
        self._worlds = worlds
        self._episodes: dict[Place, Episode | Conversations] = {}
        self._sampling: dict[Place, SamplingParams] = {}
        # Turns that the policy takes, by the names of their requests: PLACE@NUMBER.
        self._turns: dict[str, Request] = {}
        self._counts: dict[Place, int] = {}  # of the requests of each episode
        self._new: list[str] = []  # turns that are not submitted
        self._closing: set[Place] = set()  # complete episodes whose environments are being closed

    def begin(self, place: Place, prompt: Prompt, sampling: SamplingParams) -> None:
        rules = replace(self._worlds.rules, max_response_tokens=sampling.max_response_tokens)
        self._episodes[place] = Episode(prompt, f"{prompt.prompt_id}/{place.number}", self._worlds.writer, rules)
        self._sampling[place] = sampling
        self._worlds.host.start(str(place), self._worlds.spec_of(prompt), seed_of(prompt, sampling))

    def resume(self, stream: ResumableStream) -> None:
        self._new = sorted(self._turns, key=_place_and_number)

    def poll(self, stream: ResumableStream) -> list[tuple[Place, Trajectory]]:
        ended = []
        for name, event in self._worlds.host.wait(0.0 if self._turns else PASS_S):
            self.on_answer()
            ended += self._answered(_place(name), event, stream)
        stream.submit([self._turns[name] for name in self._new])
        self._new = []
        if self._turns:
            for response in stream.wait(TURN_S):
                ended += self._sampled(response, stream)
        return ended

    def suspend(self, stream: ResumableStream) -> list[Cut]:
        cuts = []
        for each in stream.take_back():
            if each.token_ids:
                self._turns[each.sample_id] = replace(self._turns[each.sample_id], begun=each)
            cuts.append(Cut(_place_and_number(each.sample_id)[0], len(each.token_ids)))
        return cuts

    def drop(self, serial: int) -> int:
        tokens = 0
        for place in [each for each in self._episodes if each.serial == serial]:
            tokens += self._episodes[place].trajectory().sampled_tokens
            begun = [self._turns[name].begun for name in self._turns_of(place)]
            tokens += sum(len(each.token_ids) for each in begun if each)
            self._forget(place)
            self._worlds.host.drop(str(place))
        return tokens

    def snapshot(self) -> None:
        return None

    def go_back(self, snapshot: None) -> None:
        """Drop all episodes: those that had not ended begin again when the run is resumed."""
        self._worlds.host.abandon()
        for place in list(self._episodes):
            self._forget(place)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """No-op: episodes begin again."""

    def _answered(self, place: Place, event: EnvEvent, stream: ResumableStream) -> list[tuple[Place, Trajectory]]:
        """Take in what an environment answered, or asks for."""
        if place not in self._episodes or (
            place in self._closing and isinstance(event, (EnvAsk, EnvWithdrawn, EnvStep))
        ):
            return []  # it was sent before the episode ended
        episode = self._episodes[place]
        try:
            if isinstance(event, EnvFailed) and place in self._closing:
                # The episode is complete without what close says.
                return self._end(place, episode.trajectory(close_failure=f"{event.reason}: {event.detail}"))
            if isinstance(event, EnvFailed):
                self._drop_pending(place, stream)
                return self._end(place, episode.trajectory(lost=EpisodeLost(event.reason, event.detail)))
            if isinstance(event, Mapping):
                return self._end(place, episode.trajectory(event))
            if isinstance(event, EnvStart) and isinstance(episode, Episode):
                self._ask(place, episode.begin(event))
            elif isinstance(event, EnvStep) and isinstance(episode, Episode):
                self._ask(place, episode.answered(event))
            elif isinstance(event, (EnvAsk, EnvWithdrawn, EnvStep)):
                self._converse(place, event, stream)
        except EpisodeLost as lost:
            return self._lose(place, lost, stream)
        except DataError as error:
            return self._lose(place, EpisodeLost(TEMPLATE, str(error)), stream)
        return []

    def _converse(self, place: Place, event: EnvAsk | EnvWithdrawn | EnvStep, stream: ResumableStream) -> None:
        """An environment that asks for turns by itself has done so, or withdraws one, or has ended."""
        talk = self._episodes[place]
        if not isinstance(talk, Conversations):
            talk = Conversations(talk.prompt, talk.sample_id, talk.writer, talk.rules)
            self._episodes[place] = talk
        taken = talk.take(event)
        self._cancel(place, taken.withdrawn, stream)
        if taken.request or taken.over:
            self._ask(place, taken.request)

    def _ask(self, place: Place, request: Request | None) -> None:
        """Note the request for a turn, which the next poll submits; None: the episode is over."""
        if request is None:
            self._closing.add(place)
            self._worlds.host.finish(str(place))
            return
        number = self._counts.get(place, 0)
        self._counts[place] = number + 1
        name = f"{place}@{number}"
        line = request.conversation.removeprefix(self._episodes[place].sample_id)
        self._turns[name] = replace(
            request,
            sample_id=name,
            draws_as=request.sample_id,
            conversation=f"{place}{line}",
            seed=self._sampling[place].seed,
        )
        self._new.append(name)

    def _sampled(self, response: Trajectory, stream: ResumableStream) -> list[tuple[Place, Trajectory]]:
        """The policy has acted."""
        request = self._turns.pop(response.sample_id, None)
        if request is None:  # of an episode that was lost a moment ago
            return []
        place = _place_and_number(response.sample_id)[0]
        episode = self._episodes[place]
        cut, tokens = response.stop_reason is StopReason.LENGTH, len(response.token_ids)
        try:
            if isinstance(episode, Conversations):
                said = episode.sampled(request.draw_name, response)
                self._worlds.host.answer(
                    str(place),
                    said.turn,
                    said.action,
                    cut=cut,
                    prompt_tokens=said.prompt_tokens,
                    response_tokens=tokens,
                )
            else:
                self._worlds.host.step(str(place), episode.sampled(response), cut)
        except EpisodeLost as lost:
            return self._lose(place, lost, stream)
        return []

    def _lose(self, place: Place, lost: EpisodeLost, stream: ResumableStream) -> list[tuple[Place, Trajectory]]:
        self._drop_pending(place, stream)
        trajectory = self._episodes[place].trajectory(lost=lost)
        self._worlds.host.drop(str(place))
        return self._end(place, trajectory)

    def _drop_pending(self, place: Place, stream: ResumableStream) -> None:
        episode = self._episodes[place]
        if isinstance(episode, Conversations):
            self._cancel(place, episode.drop_pending(), stream)

    def _cancel(self, place: Place, draws: Collection[str], stream: ResumableStream) -> None:
        """Drop the requests of an episode that draw as these names."""
        names = [name for name in self._turns_of(place) if self._turns[name].draw_name in draws]
        stream.cancel([name for name in names if name not in self._new])
        self._new = [name for name in self._new if name not in names]
        for name in names:
            del self._turns[name]

    def _turns_of(self, place: Place) -> list[str]:
        return [name for name in self._turns if _place_and_number(name)[0] == place]

    def _end(self, place: Place, trajectory: Trajectory) -> list[tuple[Place, Trajectory]]:
        self._forget(place)
        return [(place, trajectory)]

    def _forget(self, place: Place) -> None:
        for name in self._turns_of(place):
            del self._turns[name]
        self._episodes.pop(place, None)
        self._sampling.pop(place, None)
        self._counts.pop(place, None)
        self._closing.discard(place)
        self._new = [name for name in self._new if name in self._turns]


def _place_and_number(name: str) -> tuple[Place, int]:
    """Read PLACE@NUMBER."""
    place, _, number = name.partition("@")
    return _place(place), int(number)


def _place(name: str) -> Place:
    serial, _, number = name.partition("/")
    return Place(int(serial), int(number))
