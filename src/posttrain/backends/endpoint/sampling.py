"""A client's request while it is sampled: one request to the sampler per answer, whose progress comes to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from posttrain.backends.endpoint.driver import Driver
from posttrain.data.chat_api import Refused
from posttrain.data.openai_api.request import EndpointRequest
from posttrain.interfaces.rollout_engine import Request
from posttrain.records.trajectories import Trajectory, Unfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """A valid request with the tokens of its prompts."""

    name: str
    session: str  # "": none
    asked: EndpointRequest
    prompts: Sequence[tuple[int, ...]]
    continues: bool  # the tokens of its session
    created: float  # seconds since 1970

    def requests(self) -> list[Request]:
        """Return the sampler's requests: those of the first prompt first."""
        asked = self.asked
        count = asked.answers * len(self.prompts)
        return [
            Request(
                sample_id=f"{self.name}-{place}",
                token_ids=self.prompts[place // asked.answers],
                max_response_tokens=max(asked.max_tokens, 1),
                conversation=self.session if count == 1 else "",
                seed=asked.seed,
                sampling=asked.sampling,
                top_logprobs=asked.top_logprobs,
                prompt_logprobs=asked.echo and asked.with_logprobs,
                grammar=asked.grammar,
                draws_as="" if asked.seed is None else f"answer {place}",
            )
            for place in range(count)
        ]


class Sampling:
    """Requests in progress, for one task of the event loop."""

    def __init__(self, driver: Driver, requests: Sequence[Request], *, watched: bool):
        """Submit the requests; ``watched``: their tokens are reported while they are sampled. Raises: Closed."""
        self.names = [each.sample_id for each in requests]
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._changes: asyncio.Queue[tuple[int, Unfinished | None]] = asyncio.Queue()
        self._grown: list[tuple[int, Unfinished | None]] = []  # that ``change`` has taken in
        self._futures: list[Future[Trajectory]] = []
        self._pending = set(range(len(requests)))
        for place, request in enumerate(requests):
            self._submit(place, request, watched)

    def _submit(self, place: int, request: Request, watched: bool) -> None:
        def progress(grown: Unfinished) -> None:
            self._loop.call_soon_threadsafe(self._changes.put_nowait, (place, grown))

        def ended(future: Future[Trajectory]) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._changes.put_nowait, (place, None))

        future = self._driver.submit(request, progress if watched else None)
        self._futures.append(future)
        future.add_done_callback(ended)

    def begun(self, live: bool) -> bool:
        """Return True when an answer can begin: with the first token of a stream, or else when all responses have ended."""
        return bool(self._grown) if live else not self._pending

    async def change(self, timeout_s: float) -> None:
        """Wait for a change."""
        try:
            self._take(await asyncio.wait_for(self._changes.get(), timeout_s))
        except TimeoutError:
            return

    async def next_grown(self) -> tuple[int, Unfinished | Trajectory] | None:
        """Return what comes next: the place of a response, and its new tokens or the whole response; None when all have ended.

        Raises: as ``responses``.
        """
        if not self._grown:
            if not self._pending:
                return None
            self._take(await self._changes.get())
        place, grown = self._grown.pop(0)
        if grown is None:
            return place, _result(self._futures[place])
        return place, grown

    def _take(self, change: tuple[int, Unfinished | None]) -> None:
        if change[1] is None:
            self._pending.discard(change[0])
        self._grown.append(change)

    def ended(self) -> list[Trajectory]:
        """Return the responses that have ended so far. Raises: as ``responses``."""
        return [_result(future) for future in self._futures if future.done()]

    def responses(self) -> list[Trajectory]:
        """Return the responses, which have ended. Raises: Refused for a prompt that is too long for the sampler; Closed."""
        return [_result(future) for future in self._futures]

    def give_up(self) -> None:
        """Cancel what has not ended."""
        for place in self._pending:
            if not self._futures[place].done():
                self._driver.give_up(self.names[place])


def _result(future: Future[Trajectory]) -> Trajectory:
    try:
        return future.result()
    except ValueError as error:  # the prompt is too long for the sampler
        raise Refused(str(error)) from None
