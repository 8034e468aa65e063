"""An EnvHost whose episodes are played by programs outside the run, over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.backends.environments.open.conversation import OpenConversation
from posttrain.backends.environments.open.journal import Journal
from posttrain.backends.environments.open.names import Names
from posttrain.backends.environments.open.places import Group, Place, Places, task_label
from posttrain.backends.environments.open.scores import Scores
from posttrain.data.chat_api import Refused
from posttrain.envs.agent.turn_requests import TurnRequest
from posttrain.envs.agent.turns import AskedTurns
from posttrain.interfaces.env import (
    TEMPLATE,
    TOO_LONG,
    EnvAsk,
    EnvEvent,
    EnvFailed,
    EnvScored,
    EnvSpec,
    EnvStart,
    EnvStep,
    EnvWithdrawn,
    ScoringHost,
)
from posttrain.records.trajectories import GRAMMAR, Trajectory, Unfinished

TIMED_OUT = "conversation_timeout"  # reasons of failed episodes
UNFILLED = "group_incomplete"
LOOK_S = 0.25  # between two checks of time limits
SCORE_S = 0.01  # between two checks of environments that score


class OpenHost:
    """See interfaces.env.EnvHost. Used by the run's thread; ``request``, ``begin`` and ``reward`` by those of HTTP requests.

    Args: conversation_timeout_s, after which a conversation without request and reward has failed; group_timeout_s, after which
        the empty places of a group that was begun have failed; wait_s, for a place when all are taken (while the run trains);
        has_rows, True where episodes are rows of data, which a caller must ask for; group_size, the conversations of a group;
        journal, of the run's conversations; scorer, the host of environments that score them (where a spec is of another
        environment than open); decode, token ids to text; compared, as in FinishedConversation; ends_after_s, after which a
        conversation without a request has ended as by a call (None: it fails in time).
    """

    def __init__(
        self,
        *,
        conversation_timeout_s: float,
        group_timeout_s: float,
        wait_s: float,
        has_rows: bool,
        group_size: int,
        journal: Journal | None = None,
        scorer: ScoringHost | None = None,
        decode: Callable[[Sequence[int]], str] = lambda token_ids: "",
        compared: bool = True,
        ends_after_s: float | None = None,
    ) -> None:
        self._names = Names(journal)
        self._scores = Scores(scorer)
        self._decode, self._compared, self._ends_after_s = decode, compared, ends_after_s
        self._limits = conversation_timeout_s, group_timeout_s
        self._wait_s = wait_s
        self.has_rows = has_rows
        self._group_size = group_size
        self._changed = threading.Condition()
        self._places = Places()
        self._by_episode: dict[str, OpenConversation] = {}
        self._events: list[tuple[str, EnvEvent]] = []
        self._closed = False
        self._looked = 0.0
        self.on_close: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------------------------------ the run's thread

    def load(self, names: Sequence[str]) -> dict[str, str]:
        return self._scores.host.load(names) if self._scores.host else {}

    def start(self, episode: str, spec: EnvSpec, seed: int, saved: Any = None) -> None:
        with self._changed:
            self._places.add(Place(episode, spec, seed))
            self._changed.notify_all()

    def step(self, episode: str, action: str, cut: bool = False) -> None:
        raise RuntimeError("programs outside ask for their turns by themselves")

    def sampled(self, episode: str, turn: str, response: Trajectory) -> None:
        """Take the tokens of a turn, before its answer."""
        with self._changed:
            if (talk := self._by_episode.get(episode)) is not None:
                talk.responses[turn] = response

    def refuse(self, episode: str, turn: str, why: str) -> None:
        """Refuse a turn. A conversation in which nothing was sampled gives its place back, unless its caller has begun it."""
        with self._changed:
            talk = self._by_episode.get(episode)
            if talk is None:
                return
            talk.turns.refuse(turn, why)
            self._give_back(talk)

    def gone(self, talk: OpenConversation, request: TurnRequest) -> None:
        """The client of a request has disconnected, or does without it. A conversation that has nothing else and no name
        of its caller's, by which it would be continued, gives its place back."""
        with self._changed:
            talk.turns.gone(request)
            if not talk.named:
                self._give_back(talk)

    def _give_back(self, talk: OpenConversation) -> None:
        if talk.state != "open" or talk.turns.turns or talk.turns.waiting or talk.by_call:
            return
        talk.turns.over = True
        talk.state, talk.why = "dropped", "nothing was sampled in it"
        self._names.given_back(talk)
        del self._by_episode[talk.place.episode]
        self._places.give_back(talk.group, talk.place, time.monotonic())
        self._changed.notify_all()

    def streams(self, episode: str, turn: str) -> bool:
        talk = self._by_episode.get(episode)
        return talk is not None and talk.turns.streams(turn)

    def grown(self, episode: str, turn: str, progress: Unfinished) -> None:
        if (talk := self._by_episode.get(episode)) is not None:
            talk.turns.grown(turn, progress)

    def answer(
        self, episode: str, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int
    ) -> None:
        talk = self._by_episode.get(episode)
        if talk is None:
            return  # it has failed meanwhile
        talk.last_used = time.monotonic()
        talk.turns.answer(
            turn,
            action,
            cut=cut,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            response=talk.responses.pop(turn, None),
        )

    def finish(self, episode: str) -> None:
        with self._changed:
            talk = self._by_episode.get(episode)
            metrics: Mapping[str, float] = {}
            if talk is not None:
                if talk.has_scorer and talk.state == "ended":
                    self._scores.finish(episode)  # the environment's metrics come with the others
                    return
                metrics = {**talk.metrics, **talk.turns.counts()}
                self._end(talk, "ended", "")
                self._scores.drop(episode)
            self._events.append((episode, metrics))
            self._changed.notify_all()

    def drop(self, episode: str, failed: EnvFailed | None = None) -> None:
        with self._changed:
            self._places.drop(episode)
            self._scores.drop(episode)
            if (talk := self._by_episode.get(episode)) is not None:
                why = f"its episode has failed: {failed.detail}" if failed else "its episode was dropped by the run"
                self._end(
                    talk, "dropped", why, 400 if failed and failed.reason in (TEMPLATE, TOO_LONG, GRAMMAR) else 503
                )
            self._events = [each for each in self._events if each[0] != episode]

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        """See EnvHost. Raises: OSError when the journal cannot be written."""
        end = time.monotonic() + timeout_s
        while True:
            scored = self._scores.take()  # without the lock: a first environment loads its libraries
            with self._changed:
                for episode, event in scored:
                    self._take_score(episode, event)
                self._look()
                if self._names.journal and self._names.journal.failure:
                    raise self._names.journal.failure
                left = end - time.monotonic()
                if self._events or left <= 0:
                    events, self._events = self._events, []
                    return events
                self._changed.wait(min(left, SCORE_S if self._scores.busy else LOOK_S))

    def abandon(self) -> None:
        with self._changed:
            for group in self._places.groups:
                for place in list(group.free):
                    self._places.drop(place.episode)
            for talk in list(self._names.open.values()):
                self._end(talk, "dropped", "the run has dropped its episodes")
            self._scores.abandon()
            self._events = []

    def close(self) -> None:
        self.abandon()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._names.journal:
                self._names.journal.close()
        self._scores.close()
        self.on_close()

    # --------------------------------------------------------------------------------------- requests over HTTP

    def begin(self, name: str, label: str) -> OpenConversation:
        """Begin a conversation in any place: the caller plays the row that it is given, or the task that its environment sets.

        Raises: Refused.
        """
        with self._changed:
            if self._names.is_used(name):
                raise Refused(f"there is a conversation {name!r} already", 409)
            [talk] = self._taken(name, label, any_place=not label)
            talk.by_call = True
            if talk.has_scorer and not self._scores.set_task(talk, self._changed, self._wait_s):
                talk.by_call = False
                self._give_back(talk)
                raise Refused(f"no environment was free for {self._wait_s:g} s (environment.workers)", 503)
            return talk

    def request(self, name: str, label: str, requests: Sequence[TurnRequest]) -> list[OpenConversation]:
        """Take the choices of a request for a turn. Returns: the conversation of each, which are all that with the ``name``, or
        without one the conversation that the request extends; several choices, and a request that extends none, begin new ones.

        Args: label, the caller's name of the group, or "". Raises: Refused.
        """
        first, several = requests[0], len(requests) > 1
        with self._changed:
            talk = self._names.named(name) if name else None if several else self._names.extended(first)
            talks = [talk] if talk else []
            if not talks:
                if name and first.goes_on and (why := self._names.lost(name)):
                    raise Refused(f"the conversation {name!r} cannot go on: {why}; begin it again", 409)
                if self.has_rows:
                    what = "the episodes of this run are rows of its data: begin with POST /conversations, which returns one"
                    raise Refused(what, 409)
                label = label or task_label(first.messages, first.tools, first.prompt)
                talks = self._taken(name, label, any_place=False, count=1 if name else len(requests))
            for each in talks:
                each.last_used = time.monotonic()
        if len(talks) == 1:
            talks[0].turns.requested(requests)
            return talks * len(requests)
        for each, request in zip(talks, requests, strict=True):
            each.turns.requested([request])
        return talks

    def reward(self, name: str, reward: float | None, metrics: Mapping[str, float]) -> OpenConversation:
        """End a conversation with its reward; None: its environment scores it, or the run's reward terms. The same reward twice
        is answered twice.

        Raises: Refused.
        """
        with self._changed:
            known = self._names.known(name)
            if known is not None and known.has_scorer:
                if reward is not None:
                    raise Refused("the environment of the run scores its conversations: leave reward out", 409)
                if known.state in ("scoring", "ended"):
                    return known
            if known is not None and known.state == "ended" and known.reward == reward:
                return known
            talk = self._names.for_reward(name)
            self._ended_by_call(talk, reward, metrics)
            self._names.check()
            return talk

    def found(self, name: str) -> OpenConversation:
        """Raises: Refused."""
        with self._changed:
            return self._names.found(name)

    # --------------------------------------------------------------------------------------------------- inside

    def _taken(self, name: str, label: str, *, any_place: bool, count: int = 1) -> list[OpenConversation]:
        """Take places of one group for new conversations, as soon as there are so many."""
        if count > self._group_size:
            what = f"n is {count}, and each choice is a conversation of one group, which has {self._group_size}"
            raise Refused(f"{what} (rollout.samples_per_prompt)")
        end = time.monotonic() + self._wait_s
        while True:
            if self._closed:
                raise Refused("the run has ended", 503)
            now = time.monotonic()
            found = self._places.take_any(now) if any_place else self._places.take(label, now, count)
            if found is not None:
                break
            if now >= end:
                what = f"the run takes no further conversation now: it has been training or full for {self._wait_s:g} s"
                raise Refused(f"{what}; try again", 503)
            self._changed.wait(min(end - now, LOOK_S))
        group, places = found
        return [self._begun(name, group, place) for place in places]

    def _begun(self, given: str, group: Group, place: Place) -> OpenConversation:
        name = given or self._names.new()
        talk: OpenConversation

        def emit(event: EnvAsk | EnvWithdrawn | EnvStep | Exception) -> None:
            self._emit(talk, event)

        start = f"{place.conversations}." if place.conversations > 1 else ""
        turns = AskedTurns(place.spec, emit, self._changed, start=start)
        talk = OpenConversation(name, group, place, turns, time.monotonic(), named=bool(given))
        self._by_episode[place.episode] = talk
        self._names.begun(talk)
        return talk

    def _ended_by_call(self, talk: OpenConversation, reward: float | None, metrics: Mapping[str, float]) -> None:
        """End a conversation that has turns with its reward, or hand it to its environment."""
        talk.turns.end("the conversation has ended with its reward")
        talk.reward, talk.metrics = reward, dict(metrics)
        if not talk.has_scorer:
            self._emit_end(talk, EnvStep(done=True, stop="ended", reward=reward))
            return
        talk.state = "scoring"
        self._names.note(talk)
        self._scores.score(talk.place, talk.turns.finished(self._decode, compared=self._compared))
        self._changed.notify_all()

    def _emit_end(self, talk: OpenConversation, step: EnvStep) -> None:
        self._emit(talk, step)
        self._end(talk, "ended", "")
        self._by_episode[talk.place.episode] = talk  # until the run has taken it in

    def _take_score(self, episode: str, event: EnvEvent) -> None:
        """Take in what the environment of a conversation says: its task, its score, its failure, or at last its metrics."""
        talk = self._by_episode.get(episode)
        if isinstance(event, EnvFailed):
            self._scores.failed(episode)
        if talk is None:
            return
        match event:
            case EnvStart():
                talk.task = event
                self._changed.notify_all()
            case EnvScored():
                talk.reward = event.reward
                stop = event.stop or "ended"
                self._emit_end(talk, EnvStep(done=True, stop=stop, reward=event.reward, metrics=event.metrics))
            case EnvFailed() if talk.state in ("open", "scoring"):
                self._emit(talk, EnvFailed(event.reason, f"the environment of {talk.name}: {event.detail}"))
                self._end(talk, "failed", f"its environment has failed ({event.reason}): {event.detail}")
            case EnvFailed():  # to close: the episode keeps its score
                del self._by_episode[episode]
                self._events.append((episode, event))
            case Mapping():
                del self._by_episode[episode]
                self._events.append((episode, {**event, **talk.metrics, **talk.turns.counts()}))

    def _emit(self, talk: OpenConversation, event: EnvAsk | EnvWithdrawn | EnvStep | EnvFailed | Exception) -> None:
        with self._changed:
            if not isinstance(event, Exception):
                self._events.append((talk.place.episode, event))
            self._changed.notify_all()

    def _end(self, talk: OpenConversation, state: str, why: str, status: int = 503) -> None:
        self._by_episode.pop(talk.place.episode, None)
        if talk.state not in ("open", "scoring"):
            return
        talk.state, talk.why = state, why
        self._names.ended(talk)
        talk.turns.end(why or "the conversation has ended", status)
        self._places.ended(talk.group, time.monotonic())

    def _look(self) -> None:
        """Fail the conversations and the places whose time is over."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        conversation_s, group_s = self._limits
        for talk in [talk for talk in self._names.open.values() if talk.state == "open" and not talk.turns.waiting]:
            idle_s = now - talk.last_used
            if self._ends_after_s is not None and idle_s > self._ends_after_s and talk.turns.turns:
                self._ended_by_call(talk, None, {})
            elif idle_s > conversation_s:
                self._scores.drop(talk.place.episode)
                why = f"no request and no reward came for {conversation_s:g} s"
                self._emit(talk, EnvFailed(TIMED_OUT, f"the conversation {talk.name}: {why}"))
                self._end(talk, "failed", why)
        for place in self._places.unfilled(now - group_s):
            detail = f"no further conversation of its group was begun for {group_s:g} s"
            self._events.append((place.episode, EnvFailed(UNFILLED, detail)))
