"""Request stream over servers: requests are submitted while others are being answered.

The requests live in an event loop in a thread of its own, so that sending, retries and deadlines do not depend on a waiting
caller.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import zlib
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from posttrain.backends.serving.images import refuse_images
from posttrain.backends.serving.replicas import Replicas
from posttrain.interfaces.rollout_engine import OnTokens, Request, check_requests
from posttrain.records.trajectories import SamplingParams, Trajectory

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")


class RequestServers(Protocol):
    """The servers that a stream asks (serving.engine.ServedEngine)."""

    replicas: Replicas
    content_hash: str

    async def get_ready(self, client: httpx2.AsyncClient) -> None: ...

    async def after_generate(self, client: httpx2.AsyncClient) -> None: ...

    async def sample(
        self,
        client: httpx2.AsyncClient,
        gate: asyncio.Semaphore,
        sample_id: str,
        token_ids: Sequence[int],
        home: int,
        sampling: SamplingParams,
    ) -> Trajectory: ...


class ServedStream:
    """See interfaces.rollout_engine.RequestStream. A conversation's requests go to one server, whose cache holds its past."""

    def __init__(self, engine: RequestServers, sampling: SamplingParams, on_tokens: OnTokens | None):
        """Open the stream. Raises: RunStopped when no server is available, or one serves other weights."""
        self._engine = engine
        self._sampling = sampling
        self._on_tokens = on_tokens
        self._under_way: dict[str, Future[Trajectory]] = {}
        self._ended: queue.SimpleQueue[tuple[str, Future[Trajectory]]] = queue.SimpleQueue()
        self._checked = ""  # hash of the weights that the servers served at the last check
        self.closed = False
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        try:
            self._client, self._gate = self._do(self._open())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close(put_to_sleep=exception[0] is None)

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests. Also raises RunStopped when a server does not serve the weights sent since the last request."""
        if self.closed:
            raise RuntimeError("the stream is closed")
        check_requests(requests, self._under_way)
        refuse_images(request.images for request in requests)
        if self._checked != self._engine.content_hash:
            self._do(self._look())
        for request in requests:
            future = asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)
            self._under_way[request.sample_id] = future
            future.add_done_callback(lambda done, name=request.sample_id: self._ended.put((name, done)))  # type: ignore[misc]

    def wait(self, timeout_s: float) -> list[Trajectory]:
        end = time.monotonic() + timeout_s
        found: list[Trajectory] = []
        while self._under_way and not (found and self._ended.empty()):
            try:
                name, future = self._ended.get(timeout=max(end - time.monotonic(), 0.0))
            except queue.Empty:
                break
            if self._under_way.get(name) is not future:
                continue  # it was cancelled
            del self._under_way[name]
            trajectory = future.result()
            if self._on_tokens:
                self._on_tokens(len(trajectory.token_ids))
            found.append(trajectory)
        return found

    def cancel(self, sample_ids: Collection[str]) -> None:
        for name in [name for name in self._under_way if name in sample_ids]:
            self._under_way.pop(name).cancel()

    def close(self) -> None:
        self._close(put_to_sleep=True)

    def _close(self, *, put_to_sleep: bool) -> None:
        if self.closed:
            return
        self.closed = True
        self.cancel(list(self._under_way))
        try:
            self._do(self._end(put_to_sleep))
        finally:
            self._stop()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------------------------------------ in the loop's thread

    async def _open(self) -> tuple[httpx2.AsyncClient, asyncio.Semaphore]:
        client = self._engine.replicas.client()
        try:
            await self._engine.get_ready(client)
        except BaseException:
            await client.aclose()
            raise
        self._checked = self._engine.content_hash
        return client, asyncio.Semaphore(self._engine.replicas.in_flight)

    async def _look(self) -> None:
        await self._engine.get_ready(self._client)
        self._checked = self._engine.content_hash

    async def _answer(self, request: Request) -> Trajectory:
        home = zlib.crc32((request.conversation or str(request.token_ids)).encode())
        sampling = replace(self._sampling, max_response_tokens=request.max_response_tokens)
        return await self._engine.sample(self._client, self._gate, request.sample_id, request.token_ids, home, sampling)

    async def _end(self, put_to_sleep: bool) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        try:
            if put_to_sleep:
                await self._engine.after_generate(self._client)
        finally:
            await self._client.aclose()
