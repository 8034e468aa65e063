"""An EnvHost whose episodes are played by programs outside the run, over HTTP."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.backends.environments.open.journal import Journal
from posttrain.backends.environments.open.places import Group, Place, Places, task_label
from posttrain.data.chat_api import Refused
from posttrain.envs.agent.turn_requests import TurnRequest
from posttrain.envs.agent.turns import AskedTurns
from posttrain.interfaces.env import TEMPLATE, TOO_LONG, EnvAsk, EnvEvent, EnvFailed, EnvSpec, EnvStep, EnvWithdrawn
from posttrain.libraries import disk_errors
from posttrain.records.trajectories import GRAMMAR, Trajectory, Unfinished

TIMED_OUT = "conversation_timeout"  # reasons of failed episodes
UNFILLED = "group_incomplete"
LOOK_S = 0.25  # between two checks of time limits
MOST_REMEMBERED = 10_000  # conversations that have ended: a reward sent twice is answered


@dataclass(slots=True, eq=False)
class OpenConversation:
    """A conversation of a program outside, which is an episode of the run."""

    name: str
    group: Group
    place: Place
    turns: AskedTurns
    last_used: float
    # open, ended, failed or dropped; the last two with the reason.
    state: str = "open"
    why: str = ""
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    # Sampled turns that are not answered yet.
    responses: dict[str, Trajectory] = field(default_factory=dict)
    named: bool = False  # by its caller
    by_call: bool = False  # begun by POST /conversations


class OpenHost:
    """See interfaces.env.EnvHost. Used by the run's thread; ``request``, ``begin`` and ``reward`` by those of HTTP requests.

    Args: conversation_timeout_s, after which a conversation without request and reward has failed; group_timeout_s, after which
        the empty places of a group that was begun have failed; wait_s, for a place when all are taken (while the run trains);
        has_rows, True where episodes are rows of data, which a caller must ask for; group_size, the conversations of a group;
        journal, of the run's conversations on the disk.
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
    ) -> None:
        self._journal = journal
        self._limits = conversation_timeout_s, group_timeout_s
        self._wait_s = wait_s
        self.has_rows = has_rows
        self._group_size = group_size
        self._changed = threading.Condition()
        self._places = Places()
        self._open: dict[str, OpenConversation] = {}  # by name
        self._over: dict[str, OpenConversation] = {}  # by name, oldest first
        self._by_episode: dict[str, OpenConversation] = {}
        self._events: list[tuple[str, EnvEvent]] = []
        self._numbers = itertools.count()
        self._start = secrets.token_hex(3)  # of this start of the run, in the names of its conversations
        self._closed = False
        self._looked = 0.0
        self.on_close: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------------------------------ the run's thread

    def load(self, names: Sequence[str]) -> dict[str, str]:
        return {}

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
        self._note_end(talk)
        del self._open[talk.name], self._by_episode[talk.place.episode]
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
                metrics = {**talk.metrics, **talk.turns.counts()}
                self._end(talk, "ended", "")
            self._events.append((episode, metrics))
            self._changed.notify_all()

    def drop(self, episode: str, failed: EnvFailed | None = None) -> None:
        with self._changed:
            self._places.drop(episode)
            if (talk := self._by_episode.get(episode)) is not None:
                why = f"its episode has failed: {failed.detail}" if failed else "its episode was dropped by the run"
                self._end(
                    talk, "dropped", why, 400 if failed and failed.reason in (TEMPLATE, TOO_LONG, GRAMMAR) else 503
                )
            self._events = [each for each in self._events if each[0] != episode]

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        """See EnvHost. Raises: OSError when the journal cannot be written."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._look()
                if self._journal and self._journal.failure:
                    raise self._journal.failure
                left = end - time.monotonic()
                if self._events or left <= 0:
                    events, self._events = self._events, []
                    return events
                self._changed.wait(min(left, LOOK_S))

    def abandon(self) -> None:
        with self._changed:
            for group in self._places.groups:
                for place in list(group.free):
                    self._places.drop(place.episode)
            for talk in list(self._open.values()):
                self._end(talk, "dropped", "the run has dropped its episodes")
            self._events = []

    def close(self) -> None:
        self.abandon()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._journal:
                self._journal.close()
        self.on_close()

    # --------------------------------------------------------------------------------------- requests over HTTP

    def begin(self, name: str, label: str) -> OpenConversation:
        """Begin a conversation in any place: the caller plays the row that it is given. Raises: Refused."""
        with self._changed:
            trained = self._journal is not None and self._journal.told(name) != self._lost(name)
            if name in self._open or name in self._over or trained:
                raise Refused(f"there is a conversation {name!r} already", 409)
            [talk] = self._taken(name, label, any_place=not label)
            talk.by_call = True
            return talk

    def request(self, name: str, label: str, requests: Sequence[TurnRequest]) -> list[OpenConversation]:
        """Take the choices of a request for a turn. Returns: the conversation of each, which are all that with the ``name``, or
        without one the conversation that the request extends; several choices, and a request that extends none, begin new ones.

        Args: label, the caller's name of the group, or "". Raises: Refused.
        """
        first, several = requests[0], len(requests) > 1
        with self._changed:
            talk = self._named(name) if name else None if several else self._extended(first)
            talks = [talk] if talk else []
            if not talks:
                if name and _goes_on(first) and (why := self._lost(name)):
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
        """End a conversation with its reward; None: the run's reward terms score it. The same reward twice is answered twice.

        Raises: Refused.
        """
        with self._changed:
            over = self._over.get(name)
            if over is not None and over.state == "ended" and over.reward == reward:
                return over
            talk = self._named(name)
            if talk is None:
                if self._journal and (told := self._journal.told(name)):
                    raise Refused(f"the conversation {name!r} gets no reward: {told}", 409)
                raise Refused(f"there is no conversation {name!r}{self._earlier(name)}", 404)
            if not talk.turns.turns:
                raise Refused(f"the conversation {name!r} has no turn of the policy that a reward could be for", 409)
            talk.turns.end("the conversation has ended with its reward")
            talk.reward, talk.metrics = reward, dict(metrics)
            self._emit(talk, EnvStep(done=True, stop="ended", reward=reward))
            self._end(talk, "ended", "")
            self._by_episode[talk.place.episode] = talk  # until the run has taken it in
            self._check_journal()
            return talk

    def found(self, name: str) -> OpenConversation:
        """Raises: Refused."""
        with self._changed:
            talk = self._open.get(name) or self._over.get(name)
            if talk is None:
                told = self._journal.told(name) if self._journal else ""
                raise Refused(f"there is no conversation {name!r}{f': {told}' if told else self._earlier(name)}", 404)
            return talk

    # --------------------------------------------------------------------------------------------------- inside

    def _named(self, name: str) -> OpenConversation | None:
        if (over := self._over.get(name)) is not None:
            detail = f": {over.why}" if over.why else ""
            raise Refused(f"the conversation {name!r} has {_PAST[over.state]}{detail}", 409)
        return self._open.get(name)

    def _lost(self, name: str) -> str:
        """Return why a conversation of an earlier start of the run is not trained on; "" where there is no such one."""
        return self._journal.lost(name) if self._journal else ""

    def _earlier(self, name: str) -> str:
        head, _, number = name.rpartition("-")
        if number.isdigit() and head.startswith("conversation-") and head != f"conversation-{self._start}":
            return ": it is of an earlier start of this run, which ended before its reward came; it is not trained on"
        return ""

    def _extended(self, request: TurnRequest) -> OpenConversation | None:
        """The conversation that a request without a name goes on in: the newest whose messages it extends."""
        for talk in reversed(self._open.values()):
            if talk.turns.extends(request):
                return talk
        return None

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
        name = given or f"conversation-{self._start}-{next(self._numbers)}"
        talk: OpenConversation

        def emit(event: EnvAsk | EnvWithdrawn | EnvStep | Exception) -> None:
            self._emit(talk, event)

        start = f"{place.conversations}." if place.conversations > 1 else ""
        turns = AskedTurns(place.spec, emit, self._changed, start=start)
        talk = OpenConversation(name, group, place, turns, time.monotonic(), named=bool(given))
        self._open[name] = self._by_episode[place.episode] = talk
        if self._journal:
            self._journal.begun(name, place.episode)
            self._check_journal()
        return talk

    def _check_journal(self) -> None:
        """Raises: Refused when the journal cannot be written: the run ends at its next ``wait``, and trains on nothing since."""
        if self._journal and (failure := self._journal.failure):
            raise Refused(f"the run is ending, and this is not trained on: {disk_errors.described(failure)}", 503)

    def _emit(self, talk: OpenConversation, event: EnvAsk | EnvWithdrawn | EnvStep | EnvFailed | Exception) -> None:
        with self._changed:
            if not isinstance(event, Exception):
                self._events.append((talk.place.episode, event))
            self._changed.notify_all()

    def _end(self, talk: OpenConversation, state: str, why: str, status: int = 503) -> None:
        self._by_episode.pop(talk.place.episode, None)
        if talk.state != "open":
            return
        talk.state, talk.why = state, why
        self._note_end(talk)
        talk.turns.end(why or "the conversation has ended", status)
        self._open.pop(talk.name, None)
        self._over[talk.name] = talk
        while len(self._over) > MOST_REMEMBERED:
            del self._over[next(iter(self._over))]
        self._places.ended(talk.group, time.monotonic())

    def _note_end(self, talk: OpenConversation) -> None:
        if self._journal:
            self._journal.ended(talk.name, talk.state, talk.why, talk.reward)

    def _look(self) -> None:
        """Fail the conversations and the places whose time is over."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        conversation_s, group_s = self._limits
        for talk in [talk for talk in self._open.values() if not talk.turns.waiting]:
            if now - talk.last_used > conversation_s:
                why = f"no request and no reward came for {conversation_s:g} s"
                self._emit(talk, EnvFailed(TIMED_OUT, f"the conversation {talk.name}: {why}"))
                self._end(talk, "failed", why)
        for place in self._places.unfilled(now - group_s):
            detail = f"no further conversation of its group was begun for {group_s:g} s"
            self._events.append((place.episode, EnvFailed(UNFILLED, detail)))


def _goes_on(request: TurnRequest) -> bool:
    """Return True for a chat that holds earlier turns of the policy; a completion shows none."""
    return request.prompt is None and any(message.get("role") == "assistant" for message in request.messages)


_PAST = {"ended": "ended", "failed": "failed", "dropped": "been dropped"}


def described(talk: OpenConversation) -> dict[str, Any]:
    """Return the description of a conversation for its caller."""
    row = {name: value for name, value in talk.place.spec.row.items() if name != "ground_truth"}
    return {
        "conversation": talk.name,
        "sample": talk.place.episode,
        "group": talk.group.name,
        "state": talk.state,
        **({"why": talk.why} if talk.why else {}),
        "turns": talk.turns.turns,
        "reward": talk.reward,
        "messages": list(talk.place.spec.messages),
        "row": row,
        "seed": talk.place.seed,
    }
