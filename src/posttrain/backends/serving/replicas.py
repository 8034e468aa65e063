"""Copies of one server: choice of the copy, health checks, retries and deadlines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from posttrain.errors import RunStopped
from posttrain.libraries.json_http import ANSWER, CONNECTION, TIMEOUT, HttpFailure, ask, open_client, short, wait_s

if TYPE_CHECKING:
    import httpx2

LARGEST_ANSWER_BYTES = 256 << 20  # a response of 100,000 tokens with its log-probs is some 10 MiB
PROBE_S = 10.0  # time limit of a health check


@dataclass(slots=True, eq=False)
class Replica:
    """One server. ``current`` is False from a failure to the next successful health check."""

    url: str
    current: bool = True
    why: str = ""  # the failure, when not current

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"


@dataclass(slots=True, kw_only=True)
class Replicas:
    """The servers of one model, a sampler's or a teacher's.

    A group's requests go to one server, whose cache then holds their prompt; when that one fails, the next one takes over.
    """

    urls: Sequence[str]
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float  # per response, from the first try to the last, waits included
    retries: int
    in_flight: int  # concurrent requests, over all servers
    health_path: str = "/health"
    kind: str = "sampler"  # in messages
    timeout_setting: str = "rollout.timeout_s"
    last_words: Callable[[], str] = lambda: ""  # the end of the log of a server started by the run
    # A further check of a healthy server, before it is used (again). Raises: HttpFailure.
    admit: Callable[[httpx2.AsyncClient, Replica], Awaitable[None]] | None = None
    all: list[Replica] = field(init=False)

    def __post_init__(self) -> None:
        self.all = [Replica(url.rstrip("/")) for url in self.urls]

    def client(self) -> httpx2.AsyncClient:
        return open_client(self.headers, connections=self.in_flight + len(self.all))

    def current(self) -> list[Replica]:
        return [replica for replica in self.all if replica.current]

    def of_group(self, group: int, attempt: int) -> Replica | None:
        """Return the server of a group's requests; after a failure, the next. None when none is left."""
        current = self.current()
        if not current:
            return None
        home = self.all[group % len(self.all)]
        if attempt == 0 and home.current:
            return home
        return current[(group + attempt) % len(current)]

    async def probe(self, client: httpx2.AsyncClient, replicas: Sequence[Replica] | None = None) -> None:
        """Check the health of servers, concurrently."""
        await asyncio.gather(*(self._probe(client, each) for each in (self.all if replicas is None else replicas)))

    async def _probe(self, client: httpx2.AsyncClient, replica: Replica) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await self._healthy(client, replica)
                if self.admit is not None:
                    await self.admit(client, replica)
            replica.current, replica.why = True, ""
        except TimeoutError:
            replica.current, replica.why = False, f"{replica} did not answer within {PROBE_S:g} s"
        except HttpFailure as failure:
            replica.current, replica.why = False, str(failure)

    async def _healthy(self, client: httpx2.AsyncClient, replica: Replica) -> None:
        try:
            await self.ask_once(client, replica, "GET", self.health_path)
        except HttpFailure as failure:
            if failure.kind != ANSWER:  # a status of 200 with a text that is not JSON
                raise

    def nobody(self) -> RunStopped:
        reasons = "; ".join(replica.why or f"{replica} failed" for replica in self.all)
        words = self.last_words()
        return RunStopped(f"no {self.kind} is left: {reasons}" + (f"\nThe end of its log:\n{words}" if words else ""))

    async def ask_once(
        self, client: httpx2.AsyncClient, replica: Replica, method: str, path: str, body: Any = None
    ) -> Any:
        """Send one request. Raises: HttpFailure."""
        return await ask(
            client,
            method,
            replica.url + path,
            None if body is None else json.dumps(body).encode(),
            name=str(replica) + path.partition("?")[0],
            largest_bytes=LARGEST_ANSWER_BYTES,
            quoted=self._quoted,
            empty=True,
        )

    async def ask_group(
        self, client: httpx2.AsyncClient, group: int, path: str, body: Mapping[str, Any]
    ) -> tuple[Replica, Any]:
        """Send a request to a group's server, or to another when it fails. Returns: the server that answered, and the answer.

        Raises: HttpFailure when all tries failed or the time is over; RunStopped when no server is left, or one rejects the
            request, which would be rejected again.
        """
        seconds = asyncio.get_running_loop().time
        end = seconds() + self.timeout_s
        encoded = json.dumps(body).encode()
        try:
            async with asyncio.timeout_at(end):
                for attempt in range(self.retries + 1):
                    replica = self.of_group(group, attempt)
                    if replica is None:
                        await self.probe(client)
                        replica = self.of_group(group, attempt)
                        if replica is None:
                            raise self.nobody()
                    try:
                        return replica, await self.ask_once(client, replica, "POST", path, body)
                    except HttpFailure as failure:
                        if failure.status and not failure.passing:
                            raise RunStopped(f"the {self.kind} rejected the request: {failure}") from None
                        if not failure.passing or attempt == self.retries:
                            raise
                        pause_s = max(failure.after_s, wait_s(encoded, attempt))
                        if failure.kind == CONNECTION:
                            await self.probe(client, [replica])
                            if not replica.current and self.current():
                                pause_s = 0.0  # another server takes over immediately
                        if seconds() + pause_s >= end:
                            raise
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            raise HttpFailure(TIMEOUT, f"no response within {self.timeout_setting} = {self.timeout_s:g} s") from None
        raise AssertionError("the last try ends the loop")

    async def tell_all(
        self,
        client: httpx2.AsyncClient,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        replicas: Sequence[Replica] | None = None,
    ) -> list[tuple[Replica, Any]]:
        """Send the same request to all current servers. Returns: their answers. Raises: RunStopped, naming the failed server."""

        async def tell(replica: Replica) -> tuple[Replica, Any]:
            try:
                async with asyncio.timeout(timeout_s):
                    return replica, await self.ask_once(client, replica, method, path, body)
            except TimeoutError:
                raise RunStopped(f"{replica}{path} did not answer within {timeout_s:g} s") from None
            except HttpFailure as failure:
                raise RunStopped(str(failure)) from None

        chosen = self.current() if replicas is None else replicas
        answers = await asyncio.gather(*(tell(each) for each in chosen), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _quoted(self, text: str) -> str:
        """Remove the values of our headers from a server's text."""
        for value in self.headers.values():
            for secret in (value, value.rpartition(" ")[2]):  # "Bearer abc", and abc
                text = text.replace(secret, "…")
        return short(text)
