"""A reward that a server gives: many responses at once, each content once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.interfaces.reward import NotScored
from posttrain.records.prompts import Prompt
from posttrain.rewards.answer_cache import AnswerCache, Cache
from posttrain.rewards.http import ANSWER, Counts, Server, open_client, post

if TYPE_CHECKING:
    import httpx2

Result = float | Exception


class AskingReward:
    """A RewardFn that is better asked about many responses at once.

    Args: ``question`` makes the JSON value that is sent of a prompt and a response; ``read`` finds the score in the JSON value
        that comes back, or raises NotScored; ``rule`` says how it is read, since the same answer read in another way is
        another score; ``batch`` above 1 sends lists of so many questions and expects a list of as many answers.
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
        self._turn = threading.Lock()

    def keep_in(self, folder: Path) -> None:
        """The run's folder, for a cache that outlives the process. Raises: ConfigError when the cache cannot be read."""
        if self._cache == "run":
            self._known.move_to(folder)

    def __call__(self, prompt: Prompt, response: str) -> float:
        """Raises: NotScored; TypeError or ValueError for a row that JSON cannot hold."""
        [result] = self.score_many([(prompt, response)])
        if isinstance(result, Exception):
            raise result
        return result

    def score_many(self, responses: Sequence[tuple[Prompt, str]]) -> list[Result]:
        """Per response, in order, its score or why it has none."""
        with self._turn, asyncio.Runner(loop_factory=_Loop) as runner:
            return runner.run(self._score_many(responses))

    def take_counts(self) -> Mapping[str, int]:
        """What has been asked since this was called before, by name."""
        counts, self._counts = self._counts, Counts()
        return asdict(counts)

    async def _score_many(self, responses: Sequence[tuple[Prompt, str]]) -> list[Result]:
        results: dict[int, Result] = {}
        waiting: dict[bytes, list[int]] = {}  # responses by what is asked about them
        questions: dict[bytes, str] = {}
        for index, (prompt, response) in enumerate(responses):
            try:
                question = _json(self._question(prompt, response))
            except (NotScored, TypeError, ValueError, RecursionError) as error:
                results[index] = error
                continue
            key = self._key(question) if self._cache != "off" else index.to_bytes(8)
            known = self._known.get(key) if self._cache != "off" else None
            if known is not None:
                results[index] = known
            else:
                questions[key] = question
                waiting.setdefault(key, []).append(index)
            self._counts.cache_hits += known is not None or len(waiting[key]) > 1
        if questions:
            for key, result in (await self._ask_all(questions)).items():
                results |= dict.fromkeys(waiting[key], result)
        return [results[index] for index in range(len(responses))]

    async def _ask_all(self, questions: Mapping[bytes, str]) -> dict[bytes, Result]:
        keys = list(questions)
        groups = [keys[start : start + self._batch] for start in range(0, len(keys), self._batch)]
        gate = asyncio.Semaphore(self._server.concurrency)
        results: dict[bytes, Result] = {}
        async with open_client(self._server) as client:

            async def ask(group: list[bytes]) -> None:
                async with gate:
                    results.update(await self._ask(client, {key: questions[key] for key in group}))

            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    tasks.create_task(ask(group))
        return results

    async def _ask(self, client: httpx2.AsyncClient, questions: Mapping[bytes, str]) -> dict[bytes, Result]:
        body = f"[{','.join(questions.values())}]" if self._batch > 1 else next(iter(questions.values()))
        try:
            answer = await post(client, self._server, body.encode(), self._counts)
            self._counts.add_usage(answer)
            answers = answer if self._batch > 1 else [answer]
            if not isinstance(answers, list) or len(answers) != len(questions):
                raise NotScored(ANSWER, f"a list of {len(questions)} answers is expected from {self._server}")
        except NotScored as error:
            return dict.fromkeys(questions, error)
        return {key: self._found(key, each) for key, each in zip(questions, answers, strict=True)}

    def _found(self, key: bytes, answer: Any) -> Result:
        """The score, which is remembered; a failure is not."""
        try:
            score = self._read(answer)
        except NotScored as error:
            return error
        if self._cache != "off":
            self._known.put(key, score)
        return score

    def _key(self, question: str) -> bytes:
        return hashlib.sha256("\0".join([self._server.url, self._rule, question]).encode()).digest()


class _Loop(asyncio.SelectorEventLoop):
    """Does not wait, at its end, for name lookups whose deadline is over: their threads cannot be ended."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        return None


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
