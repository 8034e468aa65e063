"""The conversations of an open run by name: open ones, those that have ended, and those of earlier starts of the run."""

from __future__ import annotations

import itertools
import secrets

from posttrain.backends.environments.open.conversation import PAST, OpenConversation
from posttrain.backends.environments.open.journal import Journal
from posttrain.data.chat_api import Refused
from posttrain.envs.agent.turn_requests import TurnRequest
from posttrain.libraries import disk_errors

MOST_REMEMBERED = 10_000  # conversations that have ended: a reward sent twice is answered


class Names:
    """Guarded by its owner's lock. Args: journal, of the conversations on the disk."""

    def __init__(self, journal: Journal | None) -> None:
        self.journal = journal
        self.open: dict[str, OpenConversation] = {}  # oldest first; with those that are being scored
        self._over: dict[str, OpenConversation] = {}  # oldest first
        self._numbers = itertools.count()
        self._start = secrets.token_hex(3)  # of this start of the run, in the names of its conversations

    def new(self) -> str:
        return f"conversation-{self._start}-{next(self._numbers)}"

    def begun(self, talk: OpenConversation) -> None:
        """Raises: Refused when the journal cannot be written."""
        self.open[talk.name] = talk
        if self.journal:
            self.journal.begun(talk.name, talk.place.episode)
            self.check()

    def note(self, talk: OpenConversation) -> None:
        """Write the state of a conversation into the journal."""
        if self.journal:
            self.journal.ended(talk.name, talk.state, talk.why, talk.reward)

    def given_back(self, talk: OpenConversation) -> None:
        """Forget a conversation in which nothing was sampled: its name can be used again."""
        self.note(talk)
        del self.open[talk.name]

    def ended(self, talk: OpenConversation) -> None:
        self.note(talk)
        self.open.pop(talk.name, None)
        self._over[talk.name] = talk
        while len(self._over) > MOST_REMEMBERED:
            del self._over[next(iter(self._over))]

    def check(self) -> None:
        """Raises: Refused when the journal cannot be written: the run ends at its next ``wait``, and trains on nothing since."""
        if self.journal and (failure := self.journal.failure):
            raise Refused(f"the run is ending, and this is not trained on: {disk_errors.described(failure)}", 503)

    def known(self, name: str) -> OpenConversation | None:
        return self.open.get(name) or self._over.get(name)

    def is_used(self, name: str) -> bool:
        """Return True for a name that no further conversation may have."""
        trained = self.journal is not None and self.journal.told(name) != self.lost(name)
        return self.known(name) is not None or trained

    def named(self, name: str) -> OpenConversation | None:
        """Return the open conversation of a name, None where there is none. Raises: Refused for one that has ended."""
        if (over := self._over.get(name)) is not None:
            detail = f": {over.why}" if over.why else ""
            raise Refused(f"the conversation {name!r} has {PAST[over.state]}{detail}", 409)
        talk = self.open.get(name)
        if talk is not None and talk.state == "scoring":
            raise Refused(f"the conversation {name!r} has ended, and its environment scores it", 409)
        return talk

    def extended(self, request: TurnRequest) -> OpenConversation | None:
        """Return the conversation that a request without a name goes on in: the newest whose messages it extends."""
        return next((talk for talk in reversed(self.open.values()) if talk.turns.extends(request)), None)

    def for_reward(self, name: str) -> OpenConversation:
        """Return the open conversation that a reward is for. Raises: Refused."""
        talk = self.named(name)
        if talk is None:
            if self.journal and (told := self.journal.told(name)):
                raise Refused(f"the conversation {name!r} gets no reward: {told}", 409)
            raise Refused(f"there is no conversation {name!r}{self._earlier(name)}", 404)
        if not talk.turns.turns:
            raise Refused(f"the conversation {name!r} has no turn of the policy that a reward could be for", 409)
        return talk

    def found(self, name: str) -> OpenConversation:
        """Return a conversation in any state. Raises: Refused."""
        talk = self.known(name)
        if talk is None:
            told = self.journal.told(name) if self.journal else ""
            raise Refused(f"there is no conversation {name!r}{f': {told}' if told else self._earlier(name)}", 404)
        return talk

    def lost(self, name: str) -> str:
        """Return why a conversation of an earlier start of the run is not trained on; "" where there is no such one."""
        return self.journal.lost(name) if self.journal else ""

    def _earlier(self, name: str) -> str:
        head, _, number = name.rpartition("-")
        if number.isdigit() and head.startswith("conversation-") and head != f"conversation-{self._start}":
            return ": it is of an earlier start of this run, which ended before its reward came; it is not trained on"
        return ""
