"""A reward that a server gives: many responses at once, each content once."""

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
from posttrain.rewards.http import ANSWER, Counts, Server, open_client, post

if TYPE_CHECKING:
    import httpx2

Result = float | Exception

GATHER_S = 0.05  # how long a question waits for others that go into the same request


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    key: bytes | None  # of its content; None: it is not remembered
    question: str  # JSON
    result: asyncio.Future[Result]


class AskingReward:
    """A RewardFn that is better asked about many responses at once.

    Args: ``question`` makes the JSON value that is sent of a prompt and a response; ``read`` finds the score in the JSON value
        that comes back, or raises NotScored; ``rule`` says how it is read, since the same answer read in another way is
        another score; ``batch`` above 1 sends lists of up to so many questions and expects lists of as many answers.

    All of its state is touched in the background's thread alone.
    """

    def __init__(
        self,
        server: Server,
        *,
        question: Callable[[Prompt, str], Any],
        read: Callable[[Any], float],
        rule: str,
        batch: int = 1,
        cache: Cache = "run",
    ):
        self._server = server
        self._question = question
        self._read = read
        self._rule = rule
        self._batch = batch
        self._cache = cache
        self._known = AnswerCache()
        self._counts = Counts()
        self._taken = Counts()  # what take_counts has told of them
        self._gate = asyncio.Semaphore(server.concurrency)
        self._client: httpx2.AsyncClient | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._waiting: list[_Asked] = []  # for more of them to come, where they are asked in batches
        self._under_way: dict[bytes, asyncio.Future[Result]] = {}  # what is being asked, by content
        self._requests: set[asyncio.Task[None]] = set()

    def keep_in(self, folder: Path) -> None:
        """The run's folder, for a cache that outlives the process. Raises: ConfigError when the cache cannot be read."""
        if self._cache == "run":
            background().run(self._keep_in(folder))

    async def _keep_in(self, folder: Path) -> None:
        self._known.move_to(folder)

    def __call__(self, prompt: Prompt, response: str) -> float:
        """Raises: NotScored; TypeError or ValueError for a row that JSON cannot hold."""
        [result] = self.score_many([(prompt, response)])
        if isinstance(result, Exception):
            raise result
        return result

    def score_many(self, responses: Sequence[tuple[Prompt, str]]) -> list[Result]:
        """Per response, in order, its score or why it has none."""

        async def all_of_them() -> list[Result]:
            return await asyncio.gather(*(self.ask(prompt, response) for prompt, response in responses))

        return background().run(all_of_them())

    def take_counts(self) -> Mapping[str, int]:
        """What has been asked since this was called before, by name."""
        now, before = asdict(self._counts), asdict(self._taken)
        self._taken = Counts(**now)
        return {name: count - before[name] for name, count in now.items()}

    def close(self) -> None:
        """Give up what is under way, and close the connections."""
        background().run(self._close())

    async def _close(self) -> None:
        for request in list(self._requests):
            request.cancel()
        for asked in self._waiting:
            asked.result.cancel()
        if self._requests:
            await asyncio.wait(self._requests)
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        if self._readers is not None:
            self._readers.shutdown(wait=False)
            self._readers = None

    async def ask(self, prompt: Prompt, response: str) -> Result:
        """The score or why there is none; in the background's thread. The same content is asked about once, also while the
        answer is still to come."""
        try:
            question = _json(self._question(prompt, response))
        except (NotScored, TypeError, ValueError, RecursionError) as error:
            return error
        if self._cache == "off":
            return await self._begin(None, question)
        key = hashlib.sha256("\0".join([self._server.url, self._rule, question]).encode()).digest()
        try:
            known = self._known.get(key)
        except sqlite3.Error as error:  # such as a disk that is gone
            return error
        self._counts.cache_hits += known is not None or key in self._under_way
        if known is not None:
            return known
        if key not in self._under_way:
            self._under_way[key] = self._begin(key, question)
            self._under_way[key].add_done_callback(lambda _: self._under_way.pop(key))
        return await asyncio.shield(self._under_way[key])

    def _begin(self, key: bytes | None, question: str) -> asyncio.Future[Result]:
        """Send it, alone or with those that come within a moment."""
        loop = asyncio.get_running_loop()
        asked = _Asked(key, question, loop.create_future())
        self._waiting.append(asked)
        if len(self._waiting) >= self._batch:
            self._send()
        elif len(self._waiting) == 1:
            loop.call_later(GATHER_S, self._send_what_waits_since, asked)
        return asked.result

    def _send_what_waits_since(self, first: _Asked) -> None:
        if self._waiting and self._waiting[0] is first:
            self._send()

    def _send(self) -> None:
        group, self._waiting = self._waiting, []
        request = asyncio.get_running_loop().create_task(self._request(group))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def _request(self, group: Sequence[_Asked]) -> None:
        """Every question of the group gets its result, whatever happens."""
        try:
            async with self._gate:
                results = await self._results(group)
        except Exception as error:  # noqa: BLE001 - such as a full disk under the cache; it is counted and shown
            results = [error] * len(group)
        except asyncio.CancelledError:
            for asked in group:
                asked.result.cancel()
            raise
        for asked, result in zip(group, results, strict=True):
            if not asked.result.done():
                asked.result.set_result(result)

    async def _results(self, group: Sequence[_Asked]) -> list[Result]:
        if self._client is None:
            self._client = open_client(self._server)
        alone = self._batch == 1
        body = group[0].question if alone else f"[{','.join(asked.question for asked in group)}]"
        try:
            answer = await post(self._client, self._server, body.encode(), self._counts)
            self._counts.add_usage(answer)
            answers = [answer] if alone else answer
            if not isinstance(answers, list) or len(answers) != len(group):
                raise NotScored(ANSWER, f"a list of {len(group)} answers is expected from {self._server}")
        except NotScored as error:
            return [error] * len(group)
        return [await self._found(asked, each) for asked, each in zip(group, answers, strict=True)]

    async def _found(self, asked: _Asked, answer: Any) -> Result:
        """The score, which is remembered; a failure is not. Reading may take a while (a user's pattern on a long text): it
        is done beside this loop, which has deadlines to keep."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(1, thread_name_prefix="answers-of-servers")
        try:
            score = await asyncio.get_running_loop().run_in_executor(self._readers, self._read, answer)
        except NotScored as error:
            return error
        if asked.key is not None:
            self._known.put(asked.key, score)
        return score


def _json(value: Any) -> str:
    """Raises: TypeError, ValueError for what JSON cannot hold."""
    return json.dumps(value, default=_plain, allow_nan=False, sort_keys=True)


def _plain(value: Any) -> Any:
    """What datasets hold besides JSON's kinds: NumPy arrays and numbers, mappings of other classes."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent as JSON")
