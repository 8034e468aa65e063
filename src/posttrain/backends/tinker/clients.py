"""Sessions of clients, with the adapters that they train and the weights that they sample from."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from posttrain.backends.tinker.adapters import Adapter, AdapterShape
from posttrain.backends.tinker.training import ClientTraining
from posttrain.data.chat_api import Refused

SNAPSHOTS = 16  # of one adapter, unnamed, that are kept for sampling
_RESULTS_S = 600.0  # that a result is kept after it was fetched, since its answer may be lost on the way


@dataclass(slots=True, eq=False)
class SamplerWeights:
    """Weights that sampling sessions read; later saves of the kind inflight replace them."""

    adapter: Adapter | None
    path: str | None = None  # of a saved adapter
    gone: bool = False  # dropped, since newer snapshots took its place

    def check_kept(self) -> None:
        """Raises: Refused when these weights were dropped."""
        if self.gone:
            fix = "sample from a newer client, or save them by name"
            raise Refused(f"these weights were dropped, since {SNAPSHOTS} newer ones were saved; {fix}")


@dataclass(slots=True, eq=False)
class Trained:
    """One adapter in training."""

    model_id: str
    shape: AdapterShape
    metadata: dict[str, Any]
    training: ClientTraining | None = None  # None: not made yet
    snapshots: list[SamplerWeights] = field(default_factory=list)  # unnamed, oldest first
    inflight: SamplerWeights | None = None
    used: float = field(default_factory=time.time)


@dataclass(slots=True, eq=False)
class Session:
    """One service client."""

    session_id: str
    seen: float = field(default_factory=time.monotonic)
    models: dict[str, Trained] = field(default_factory=dict)
    samplers: dict[str, SamplerWeights] = field(default_factory=dict)
    clones: dict[str, int] = field(default_factory=dict)  # copies of a sampling client that other processes have


class Sessions:
    """All sessions. One that is silent too long ends, and its adapters are dropped."""

    def __init__(self, silence_s: float):
        self.silence_s = silence_s
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # and why

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def begin(self, session_id: str) -> Session:
        session = self._sessions[session_id] = Session(session_id)
        return session

    def of(self, name: str) -> Session:
        """Return the session of an id of its own, or of a model's or sampling session's id. Raises: Refused."""
        session_id = name.partition(":")[0]
        session = self._sessions.get(session_id)
        if session is None:
            why = self._ended.get(session_id, "it is unknown here, perhaps since the server was started again")
            fix = "make a new ServiceClient; saved states can be loaded by their tinker:// paths"
            raise Refused(f"there is no session {session_id}: {why}; {fix}", 404)
        session.seen = time.monotonic()
        return session

    def model(self, model_id: str) -> Trained:
        """Return a model by its id. Raises: Refused."""
        found = self.of(model_id).models.get(model_id)
        if found is None:
            raise Refused(f"there is no model {model_id} in this session", 404)
        found.used = time.time()
        return found

    def sampler(self, sampler_id: str) -> SamplerWeights:
        """Return the weights of a sampling session. Raises: Refused."""
        found = self.of(sampler_id).samplers.get(sampler_id)
        if found is None:
            raise Refused(f"there is no sampling session {sampler_id}", 404)
        return found

    def end(self, session_id: str, why: str) -> Session | None:
        """Forget a session. Returns: it, or None."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._ended[session_id] = why
            while len(self._ended) > 1000:
                self._ended.popitem(last=False)
        return session

    def silent(self) -> list[str]:
        """Return the sessions that have been silent too long."""
        limit = time.monotonic() - self.silence_s
        return [session.session_id for session in self if session.seen < limit]

    def trained(self) -> int:
        """Return the number of adapters in training."""
        return sum(len(session.models) for session in self)


class Results:
    """Results of requests by their ids, until they have been fetched and kept for a while, or their session has ended."""

    def __init__(self) -> None:
        self._futures: dict[str, Future[Any]] = {}
        self._fetched: dict[str, float] = {}

    def get(self, request_id: str) -> Future[Any] | None:
        return self._futures.get(request_id)

    def put(self, request_id: str, future: Future[Any]) -> None:
        self._futures[request_id] = future
        limit = time.monotonic() - _RESULTS_S
        for name in [name for name, when in self._fetched.items() if when < limit]:
            del self._fetched[name]
            self._futures.pop(name, None)

    def fetched(self, request_id: str) -> None:
        self._fetched.setdefault(request_id, time.monotonic())

    def drop(self, session_id: str) -> None:
        """Forget the results of a session."""
        for name in [name for name in self._futures if name.startswith(f"{session_id}:")]:
            del self._futures[name]
            self._fetched.pop(name, None)
