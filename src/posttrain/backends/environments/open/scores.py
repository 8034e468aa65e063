"""Environments of the run that set tasks for conversations of programs outside, and score them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from posttrain.backends.environments.open.conversation import PAST, OpenConversation
from posttrain.backends.environments.open.places import Place
from posttrain.data.chat_api import Refused
from posttrain.interfaces.env import EnvEvent, FinishedConversation, ScoringHost

LOOK_S = 0.25  # between two checks of a waiting request


class Scores:
    """Hands conversations to the host of the environments. ``set_task`` and ``score`` may be called by any thread that holds the
    owner's lock, all else by the run's alone, as the host demands.

    Args: host, None where no environment scores.
    """

    def __init__(self, host: ScoringHost | None) -> None:
        self.host = host
        # What to do for an episode; None: close its environment.
        self._new: deque[tuple[str, Callable[[ScoringHost], None] | None]] = deque()
        self._living: set[str] = set()  # episodes whose environment was created
        self._asked: set[str] = set()  # those that owe an event

    @property
    def busy(self) -> bool:
        return bool(self._new or self._asked)

    def set_task(self, talk: OpenConversation, changed: threading.Condition, wait_s: float) -> bool:
        """Wait for the task that the environment of a new conversation sets, with the owner's lock, which ``changed`` is of.

        Returns: False when no environment was free for so long. Raises: Refused when the environment fails.
        """
        place = talk.place
        self._new.append((place.episode, lambda host: host.task(place.episode, place.spec, place.seed)))
        changed.notify_all()
        end = time.monotonic() + wait_s
        while talk.task is None:
            if talk.state != "open":
                raise Refused(f"the conversation has {PAST[talk.state]}: {talk.why}", 503)
            if time.monotonic() > end:
                self._new.append((place.episode, None))
                return False
            talk.last_used = time.monotonic()  # it waits for the run, not for its program
            changed.wait(LOOK_S)
        return True

    def score(self, place: Place, finished: FinishedConversation) -> None:
        self._new.append((place.episode, lambda host: host.score(place.episode, place.spec, place.seed, finished)))

    def take(self) -> list[tuple[str, EnvEvent]]:
        """Begin what is new, and return the events so far: the EnvStart of a task, an EnvScored, the metrics after ``finish``, or
        an EnvFailed."""
        if self.host is None:
            return []
        while self._new:
            episode, begin = self._new.popleft()
            if begin is None:
                self._close(episode)
                continue
            self._living.add(episode)
            self._asked.add(episode)
            begin(self.host)
        found = self.host.wait(0.0) if self._asked else []
        self._asked -= {episode for episode, _ in found}
        return found

    def finish(self, episode: str) -> None:
        if self.host is not None:
            self._living.discard(episode)
            self._asked.add(episode)
            self.host.finish(episode)

    def drop(self, episode: str) -> None:
        """Close the environment of an episode, where there is one."""
        self._new = deque(each for each in self._new if each[0] != episode)
        self._close(episode)

    def _close(self, episode: str) -> None:
        if self.host is not None and episode in self._living:
            self._living.discard(episode)
            self._asked.discard(episode)
            self.host.drop(episode)

    def failed(self, episode: str) -> None:
        """The environment of an episode has failed, and is closed."""
        self._living.discard(episode)

    def abandon(self) -> None:
        self._new.clear()
        self._living.clear()
        self._asked.clear()
        if self.host is not None:
            self.host.abandon()

    def close(self) -> None:
        if self.host is not None:
            self.host.close()
