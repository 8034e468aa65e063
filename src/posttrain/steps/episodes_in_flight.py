"""Episodes whose sampling lasts over several steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from posttrain.errors import DataError, RunStopped, UnreadImages
from posttrain.interfaces.env import (
    TEMPLATE,
    EnvAsk,
    EnvEvent,
    EnvFailed,
    EnvRestored,
    EnvStart,
    EnvStep,
    EnvWithdrawn,
    TokenHost,
    TokenTaker,
)
from posttrain.interfaces.rollout_engine import Request, RequestStream, ResumableStream
from posttrain.interfaces.worlds import Worlds
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, Unfinished
from posttrain.steps.conversations import Conversations, with_options
from posttrain.steps.episode import Episode, EpisodeLost, reason_of
from posttrain.steps.in_flight import PASS_S, Cut, Place, place_of
from posttrain.steps.play import seed_of
from posttrain.steps.saved_episode import (
    can_be_saved,
    conversations_from_plain,
    conversations_to_plain,
    episode_from_plain,
    episode_to_plain,
    request_from_plain,
    request_to_plain,
)
from posttrain.steps.watched import Watched

TURN_S = 0.02  # of sampling, before environments are polled again


class Episodes:
    """Episodes in environments, which go on in their processes while a step trains. A turn that is suspended keeps its tokens.

    A resumed run continues the episodes whose environment can be saved (SavedEnv), and begins the others again.
    """

    waits = True

    def __init__(
        self, worlds: Worlds, on_answer: Callable[[], None] = lambda: None, *, keeps_cache: bool = False
    ) -> None:
        self.follows = False
        self.on_answer = on_answer  # called when an environment has answered
        self._keeps_cache = keeps_cache  # of turns that are suspended
        self._worlds = worlds
        self._watched = Watched(worlds.host)
        self._episodes: dict[Place, Episode | Conversations] = {}
        self._sampling: dict[Place, SamplingParams] = {}
        # Turns that the policy takes, by the names of their requests: PLACE@NUMBER.
        self._turns: dict[str, Request] = {}
        self._counts: dict[Place, int] = {}  # of the requests of each episode
        self._new: list[str] = []  # turns that are not submitted
        self._submitted: set[str] = set()
        # Events of environments that were started before their group was admitted, which no turn of the policy has followed.
        self._early: dict[Place, list[EnvEvent]] = {}
        self._released: list[tuple[str, EnvEvent]] = []  # of those admitted since
        self._env_states: dict[Place, Any] = {}  # after the environment's last answer, where it can be saved
        # Actions that environments have not answered: arguments of ``step``, or of ``answer`` where they ask for turns.
        self._acting: dict[Place, dict[str, Any]] = {}
        self._saved: Mapping[Place, Any] = {}  # episodes that are continued when they begin
        # Saved episodes whose environments are not ready, and the action that these get then.
        self._restoring: dict[Place, dict[str, Any] | None] = {}
        self._continued: set[Place] = set()
        self._left: dict[str, Any] | None = None  # the state, when all episodes were dropped to save it
        self._closing: set[Place] = set()  # complete episodes whose environments are being closed

    @property
    def samples(self) -> bool:
        return bool(self._new or self._submitted)

    @property
    def requests(self) -> int:
        return len(self._turns)

    def _turn(self, place: Place) -> int:
        episode = self._episodes[place]
        return episode.count if isinstance(episode, Episode) else self._counts.get(place, 0)

    def _tokens(self, place: Place) -> int:
        """Tokens of the turns of an episode that are not complete."""
        begun = [self._turns[name].begun for name in self._turns_of(place)]
        return sum(len(each.token_ids) for each in begun if each)

    def begin(self, place: Place, prompt: Prompt, sampling: SamplingParams) -> None:
        rules = replace(self._worlds.rules, max_response_tokens=sampling.max_response_tokens)
        self._episodes[place] = new = Episode(prompt, f"{prompt.prompt_id}/{place.number}", self._worlds.writer, rules)
        self._sampling[place] = sampling
        spec = replace(self._worlds.spec_of(prompt), saves=True, sampling=sampling, number=place.number)
        seed = seed_of(prompt, sampling)
        saved = self._saved.get(place)
        if saved is None:
            self._worlds.host.start(str(place), spec, seed)
            return
        plain = saved["episode"]
        asks = "lines" in plain
        self._episodes[place] = conversations_from_plain(new, plain) if asks else episode_from_plain(new, plain)
        self._counts[place] = saved["count"]
        self._turns |= {turn["sample_id"]: request_from_plain(turn) for turn in saved["turns"]}
        self._env_states[place] = saved["env"]
        acting = saved["acting"]  # older checkpoints have a list: the action and cut
        self._restoring[place] = (
            dict(zip(("action", "cut"), acting, strict=True)) if isinstance(acting, list) else acting
        )
        self._continued.add(place)
        self._worlds.host.start(str(place), spec, seed, saved=saved["env"])

    def prepare(self, place: Place, prompt: Prompt, sampling: SamplingParams) -> None:
        """Start the environment of a sample whose group is not admitted yet; the policy takes no turn in it until then."""
        self._early[place] = []
        self.begin(place, prompt, sampling)

    def is_prepared(self, place: Place) -> bool:
        """Tell whether the environment of a sample that was prepared has begun, or failed."""
        return bool(self._early[place])

    def admit(self, place: Place) -> None:
        """The group of a sample that was prepared is admitted."""
        self._released += [(str(place), event) for event in self._early.pop(place)]

    def resume(self) -> None:
        turns = [name for name in self._turns if _place_and_number(name)[0] not in self._restoring]
        self._new = sorted(turns, key=_place_and_number)

    def poll(self, stream: RequestStream) -> list[tuple[Place, Trajectory]]:
        ended = []
        at_once = self._submitted or self._new or self._released
        events = [*self._released, *self._worlds.host.wait(0.0 if at_once else PASS_S)]
        self._released = []
        while events:
            for name, event in events:
                self.on_answer()
                if (early := self._early.get(place_of(name))) is not None:
                    early.append(event)
                else:
                    ended += self._answered(place_of(name), event, stream)
            events = self._worlds.host.wait(0.0)  # of environments that have closed meanwhile
        stream.submit([self._with_options(name) for name in self._new])
        self._submitted |= set(self._new)
        self._new = []
        # An episode that has ended is returned before the next pass: how many fit into TURN_S depends on the machine.
        if self._submitted and not ended:
            for response in stream.wait(TURN_S):
                ended += self._sampled(response, stream)
                self._submitted.discard(response.sample_id)
            self._watched.report(stream, self._submitted)
        return ended

    def _with_options(self, name: str) -> Request:
        """Return the request of a turn with the options that an environment has asked for."""
        request, place = self._turns[name], _place_and_number(name)[0]
        talk = self._episodes[place]
        if not isinstance(talk, Conversations):
            return request
        return with_options(request, talk.options_of(request.draw_name), self._sampling[place])

    def suspend(self, stream: ResumableStream) -> list[Cut]:
        for each in stream.take_back(keep_cache=self._keeps_cache):
            if each.token_ids:
                self._turns[each.sample_id] = replace(self._turns[each.sample_id], begun=each)
        self._submitted.clear()
        open_places = [
            place for place in sorted(self._episodes) if place not in self._closing and place not in self._early
        ]
        return [Cut(place, self._turn(place), self._tokens(place)) for place in open_places]

    def keep(self, progress: Unfinished) -> None:
        if progress.sample_id in self._turns:
            self._turns[progress.sample_id] = replace(self._turns[progress.sample_id], begun=progress)

    def drop(self, serial: int) -> int:
        tokens = 0
        for place in [each for each in self._episodes if each.serial == serial]:
            tokens += self._episodes[place].trajectory().sampled_tokens
            tokens += self._tokens(place)
            self._forget(place)
            self._worlds.host.drop(str(place))
        return tokens

    def snapshot(self) -> dict[str, Any]:
        return self.state()

    def go_back(self, snapshot: dict[str, Any]) -> None:
        """Drop all episodes, before the run is saved and left."""
        self._left = snapshot
        self._worlds.host.abandon()
        self._released = []
        for place in list(self._episodes):
            self._forget(place)

    def state(self) -> dict[str, Any]:
        if self._left is not None:
            return self._left
        return {str(place): self._plain(place) for place in self._episodes if self._can_be_saved(place)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._saved = {place_of(name): saved for name, saved in state.items()}

    def began_again(self, serial: int) -> bool:
        return any(place.serial == serial and place not in self._continued for place in self._episodes)

    def _can_be_saved(self, place: Place) -> bool:
        episode = self._episodes[place]
        ready = place in self._env_states and place not in self._early and place not in self._closing
        return ready and can_be_saved(episode)

    def _plain(self, place: Place) -> dict[str, Any]:
        """An episode as it is: the environment's state after its last answer, and the action or the turn that follows."""
        episode = self._episodes[place]
        return {
            "episode": conversations_to_plain(episode)
            if isinstance(episode, Conversations)
            else episode_to_plain(episode),
            "env": self._env_states[place],
            "acting": self._acting.get(place) or self._restoring.get(place),
            "count": self._counts.get(place, 0),
            "turns": [request_to_plain(self._turns[name]) for name in self._turns_of(place)],
        }

    def _answered(self, place: Place, event: EnvEvent, stream: RequestStream) -> list[tuple[Place, Trajectory]]:
        """Take in what an environment answered, or asks for."""
        if place not in self._episodes or (
            place in self._closing and isinstance(event, (EnvAsk, EnvWithdrawn, EnvStep))
        ):
            return []  # it was sent before the episode ended
        episode = self._episodes[place]
        self._acting.pop(place, None)
        if isinstance(event, (EnvStart, EnvStep, EnvAsk)) and event.saved is not None:
            self._env_states[place] = event.saved
        try:
            if isinstance(event, EnvRestored):
                self._go_on(place)
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
        except UnreadImages:
            raise
        except DataError as error:
            return self._lose(place, EpisodeLost(TEMPLATE, str(error)), stream)
        return []

    def _go_on(self, place: Place) -> None:
        """The environment of a saved episode is ready: it takes the action that it had not answered, or the policy its turn."""
        action = self._restoring.pop(place, None)
        if action is None:
            self._new += self._turns_of(place)
        else:
            self._act(place, action)

    def _act(self, place: Place, action: dict[str, Any]) -> None:
        """Give an environment an action, or the turn that it has asked for."""
        self._acting[place] = action
        if "turn" in action:
            self._worlds.host.answer(str(place), **action)
        else:
            self._worlds.host.step(str(place), **action)

    def _converse(self, place: Place, event: EnvAsk | EnvWithdrawn | EnvStep, stream: RequestStream) -> None:
        """An environment that asks for turns by itself has done so, or withdraws one, or has ended."""
        talk = self._episodes[place]
        if not isinstance(talk, Conversations):
            talk = Conversations(talk.prompt, talk.sample_id, talk.writer, talk.rules)
            self._episodes[place] = talk
        host = self._worlds.host
        try:
            taken = talk.take(event)
        except (EpisodeLost, DataError) as error:
            if not isinstance(event, EnvAsk) or not isinstance(host, TokenHost):
                raise
            host.refuse(str(place), event.turn, reason_of(error))
            return
        self._cancel(place, taken.withdrawn, stream)
        if taken.request or taken.over:
            name = self._ask(place, taken.request)
            if self.follows and len(self._turns_of(place)) > 1:
                raise RunStopped(
                    "agents that request several turns at a time do so when they please: they cannot be replayed"
                )
            if isinstance(event, EnvAsk):
                self._watched.add(name, str(place), event.turn)

    def _ask(self, place: Place, request: Request | None) -> str:
        """Note the request for a turn, which the next poll submits; None: the episode is over. Returns: the request's name."""
        if request is None:
            self._closing.add(place)
            self._worlds.host.finish(str(place))
            return ""
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
        return name

    def _sampled(self, response: Trajectory, stream: RequestStream) -> list[tuple[Place, Trajectory]]:
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
                if isinstance(self._worlds.host, TokenTaker):
                    self._worlds.host.sampled(str(place), said.turn, response)
                counts = {"prompt_tokens": said.prompt_tokens, "response_tokens": tokens}
                self._act(place, {"turn": said.turn, "action": said.action, "cut": cut, **counts})
            else:
                self._act(place, {"action": episode.sampled(response), "cut": cut})
        except EpisodeLost as lost:
            return self._lose(place, lost, stream)
        return []

    def _lose(self, place: Place, lost: EpisodeLost, stream: RequestStream) -> list[tuple[Place, Trajectory]]:
        self._drop_pending(place, stream)
        trajectory = self._episodes[place].trajectory(lost=lost)
        self._worlds.host.drop(str(place), EnvFailed(*lost.args))
        return self._end(place, trajectory)

    def _drop_pending(self, place: Place, stream: RequestStream) -> None:
        """Withdraw the turns that the policy takes in a lost episode."""
        episode = self._episodes[place]
        if isinstance(episode, Conversations):
            episode.drop_pending()
        names = self._turns_of(place)
        self._cancel(place, {self._turns[name].draw_name for name in names}, stream)

    def _cancel(self, place: Place, draws: Collection[str], stream: RequestStream) -> None:
        """Drop the requests of an episode that draw as these names."""
        names = [name for name in self._turns_of(place) if self._turns[name].draw_name in draws]
        stream.cancel([name for name in names if name not in self._new])
        self._new = [name for name in self._new if name not in names]
        self._submitted -= set(names)
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
            self._submitted.discard(name)
        self._episodes.pop(place, None)
        self._early.pop(place, None)
        self._sampling.pop(place, None)
        self._counts.pop(place, None)
        self._env_states.pop(place, None)
        self._acting.pop(place, None)
        self._restoring.pop(place, None)
        self._continued.discard(place)
        self._closing.discard(place)
        self._new = [name for name in self._new if name in self._turns]


def _place_and_number(name: str) -> tuple[Place, int]:
    """Read PLACE@NUMBER."""
    place, _, number = name.partition("@")
    return place_of(place), int(number)
