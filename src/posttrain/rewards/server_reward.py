"""A reward computed by a server: responses are batched into requests, and equal content is sent once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.interfaces.reward import NotScored
from posttrain.records.prompts import Prompt
from posttrain.rewards.answer_cache import AnswerCache, Cache
from posttrain.rewards.background import background
from posttrain.rewards.http import ANSWER, Counts, ScoringServer, open_client, post

if TYPE_CHECKING:
    import httpx2

Result = float | Exception

# Seconds that a question waits for others to share its request.
GATHER_S = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class _PendingQuestion:
    key: bytes | None  # hash of the content; None: the answer is not cached
    question: str  # JSON
    result: asyncio.Future[Result]


class ServerReward:
    """A RewardFn that scores responses on a server, concurrently and in batches.

    Args: ``question`` builds the JSON value to send for a prompt and a response; ``read`` finds the score in the JSON value
        returned, or raises NotScored; ``rule`` identifies that reading in the cache key, since the same answer read
        differently is another score; ``batch`` above 1 sends lists of up to that many questions and expects lists of answers
        of the same length.

    All state is used in the background thread only.
    """

    def __init__(
        self,
        server: ScoringServer,
        *,
        question: Callable[[Prompt, str], Any],
        read: Callable[[Any], float],
        rule: str,
        batch: int = 1,
        cache: Cache = "run",
    ):
        self._server = server
        self._build_question = question
        self._read = read
        self._rule = rule
        self._batch = batch
        self._cache = cache
        self._answers = AnswerCache()
        self._counts = Counts()
        self._taken = Counts()  # already returned by take_counts
        self._gate = asyncio.Semaphore(server.concurrency)
        self._client: httpx2.AsyncClient | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._waiting: list[_PendingQuestion] = []  # questions of the next batch
        self._in_flight: dict[bytes, asyncio.Future[Result]] = {}  # by content
        self._requests: set[asyncio.Task[None]] = set()

    def keep_in(self, folder: Path) -> None:
        """Keep the cache in the run's folder, where it outlives the process. Raises: ConfigError when it cannot be read."""
        if self._cache == "run":
            background().run(self._keep_in(folder))

    async def _keep_in(self, folder: Path) -> None:
        self._answers.move_to(folder)

    def __call__(self, prompt: Prompt, response: str) -> float:
        """Raises: NotScored; TypeError or ValueError for a row that JSON cannot hold."""
        [result] = self.score_many([(prompt, response)])
        if isinstance(result, Exception):
            raise result
        return result

    def score_many(self, responses: Sequence[tuple[Prompt, str]]) -> list[Result]:
        """Score many responses. Returns: per response, in order, its score or the error that explains its absence."""

        async def all_of_them() -> list[Result]:
            return await asyncio.gather(*(self.score_one(prompt, response) for prompt, response in responses))

        return background().run(all_of_them())

    def take_counts(self) -> Mapping[str, int]:
        """Return the counts of requests, tokens and cache hits since the previous call, by name."""
        now, before = asdict(self._counts), asdict(self._taken)
        self._taken = Counts(**now)
        return {name: count - before[name] for name, count in now.items()}

    def close(self) -> None:
        """Cancel the requests in flight, and close the connections."""
        background().run(self._close())

    async def _close(self) -> None:
        for request in list(self._requests):
            request.cancel()
        for pending in self._waiting:
            pending.result.cancel()
        if self._requests:
            await asyncio.wait(self._requests)
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        if self._readers is not None:
            self._readers.shutdown(wait=False)
            self._readers = None

    async def score_one(self, prompt: Prompt, response: str) -> Result:
        """Score one response, in the background thread; equal content is requested once, also while its answer is pending.

        Returns: the score, or the error that explains its absence.
        """
        try:
            question = _json(self._build_question(prompt, response))
        except (NotScored, TypeError, ValueError, RecursionError) as error:
            return error
        if self._cache == "off":
            return await self._begin(None, question)
        key = hashlib.sha256("\0".join([self._server.url, self._rule, question]).encode()).digest()
        try:
            cached = self._answers.get(key)
        except sqlite3.Error as error:  # for example a lost disk
            return error
        self._counts.cache_hits += cached is not None or key in self._in_flight
        if cached is not None:
            return cached
        if key not in self._in_flight:
            self._in_flight[key] = self._begin(key, question)
            self._in_flight[key].add_done_callback(lambda _: self._in_flight.pop(key))
        return await asyncio.shield(self._in_flight[key])

    def _begin(self, key: bytes | None, question: str) -> asyncio.Future[Result]:
        """Send a question, alone or batched with others that arrive within GATHER_S."""
        loop = asyncio.get_running_loop()
        pending = _PendingQuestion(key, question, loop.create_future())
        self._waiting.append(pending)
        if len(self._waiting) >= self._batch:
            self._send()
        elif len(self._waiting) == 1:
            loop.call_later(GATHER_S, self._send_unless_sent, pending)
        return pending.result

    def _send_unless_sent(self, first: _PendingQuestion) -> None:
        if self._waiting and self._waiting[0] is first:
            self._send()

    def _send(self) -> None:
        group, self._waiting = self._waiting, []
        request = asyncio.get_running_loop().create_task(self._request(group))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def _request(self, group: Sequence[_PendingQuestion]) -> None:
        """Send a group in one request. Every question of the group gets a result, also when the request fails."""
        try:
            async with self._gate:
                results = await self._results(group)
        except Exception as error:  # noqa: BLE001 - for example a full disk under the cache; it is counted and reported
            results = [error] * len(group)
        except asyncio.CancelledError:
            for pending in group:
                pending.result.cancel()
            raise
        for pending, result in zip(group, results, strict=True):
            if not pending.result.done():
                pending.result.set_result(result)

    async def _results(self, group: Sequence[_PendingQuestion]) -> list[Result]:
        if self._client is None:
            self._client = open_client(self._server)
        alone = self._batch == 1
        body = group[0].question if alone else f"[{','.join(pending.question for pending in group)}]"
        try:
            answer = await post(self._client, self._server, body.encode(), self._counts)
            self._counts.add_usage(answer)
            answers = [answer] if alone else answer
            if not isinstance(answers, list) or len(answers) != len(group):
                raise NotScored(ANSWER, f"{self._server} did not answer with a list of {len(group)} answers")
        except NotScored as error:
            return [error] * len(group)
        return [await self._read_score(pending, each) for pending, each in zip(group, answers, strict=True)]

    async def _read_score(self, pending: _PendingQuestion, answer: Any) -> Result:
        """Read the score in an answer and cache it; failures are not cached. Reading runs in another thread: it may be slow
        (a user's pattern on a long text), and this event loop has deadlines to keep."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(1, thread_name_prefix="answers-of-servers")
        try:
            score = await asyncio.get_running_loop().run_in_executor(self._readers, self._read, answer)
        except NotScored as error:
            return error
        if pending.key is not None:
            self._answers.put(pending.key, score)
        return score


def _json(value: Any) -> str:
    """Serialize a value. Raises: TypeError, ValueError when JSON cannot represent it."""
    return json.dumps(value, default=_plain, allow_nan=False, sort_keys=True)


def _plain(value: Any) -> Any:
    """Convert the values of datasets that JSON lacks: NumPy arrays and numbers, other mapping classes."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent as JSON")
