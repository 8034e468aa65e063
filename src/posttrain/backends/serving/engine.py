"""Sampling from servers: one request per response, many in flight; a slow or failed one never blocks the step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from posttrain.backends.serving.images import refuse_images
from posttrain.backends.serving.protocol import SampledResponse, ServerProtocol, UnusableAnswer
from posttrain.backends.serving.replicas import Replicas
from posttrain.backends.serving.stream import ServedStream
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens
from posttrain.libraries.json_http import HttpFailure
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")


class ServedEngine:
    """See interfaces.rollout_engine.RolloutEngine.

    A request that fails or times out becomes a trajectory with the stop reason ``failed`` and no tokens, which no reward scores
    and no loss uses. The step stops only when all requests fail.
    """

    note: str = ""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: frozenset[int],
        replicas: Replicas,
        protocol: ServerProtocol,
    ):
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.replicas = replicas
        self.protocol = protocol
        self._version = 0
        self.content_hash = ""  # of the weights sent last; "": the weights that the server started with
        self._stream: ServedStream | None = None

    @property
    def version(self) -> int:
        return self._version

    def weights_changed(self, version: int) -> None:
        self._refuse_while_busy()
        self._version = version

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        """See interfaces.rollout_engine. Raises: RunStopped when no server is left, or one serves other weights or answers
        without token ids or log-probs."""
        self._refuse_beside_a_stream()
        self.check_sampling(sampling)
        refuse_images(prompt.images for prompt in prompts)
        return run(self._generate(prompts, sampling, on_tokens, on_group))

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> ServedStream:
        """See interfaces.rollout_engine. Raises: RunStopped as ``generate``."""
        self._refuse_beside_a_stream()
        self.check_sampling(sampling)
        self._stream = ServedStream(self, sampling, on_tokens)
        return self._stream

    def _refuse_beside_a_stream(self) -> None:
        if self._stream is not None and not self._stream.closed:
            raise RuntimeError("a stream of this sampler is open: close it first")

    def _refuse_while_busy(self) -> None:
        if self._stream is not None and self._stream.busy:
            raise RuntimeError("the weights change while responses are in progress: close the stream first")

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises: RunStopped for settings that this server does not support."""
        if sampling.prompt_logprobs and not self.protocol.gives_prompt_logprobs:
            raise RunStopped("this sampler gives no log-probs of prompts: use native or vllm")

    async def get_ready(self, client: httpx2.AsyncClient) -> None:
        """Check the servers. Raises: RunStopped when none is there, or one is not as required."""
        await self.replicas.probe(client)
        if not self.replicas.current():
            raise self.replicas.nobody()
        await self.before_generate(client)

    async def before_generate(self, client: httpx2.AsyncClient) -> None:
        """Prepare the servers before the first request; engines that can query the served weights do it here."""

    async def after_generate(self, client: httpx2.AsyncClient) -> None:
        """Clean up after all responses."""

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None,
        on_group: OnGroup | None,
    ) -> list[TrajectoryGroup]:
        groups: dict[int, TrajectoryGroup] = {}
        responses: list[list[Trajectory | None]] = [[None] * sampling.samples_per_prompt for _ in prompts]
        gate = asyncio.Semaphore(self.replicas.in_flight)
        async with self.replicas.client() as client:
            await self.get_ready(client)
            tasks = {
                asyncio.create_task(
                    self.sample(client, gate, f"{prompt.prompt_id}/{number}", prompt.token_ids, group, sampling)
                ): (group, number)
                for group, prompt in enumerate(prompts)
                for number in range(sampling.samples_per_prompt)
            }
            waiting = set(tasks)
            try:
                while waiting:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(done, key=lambda each: tasks[each]):
                        group, number = tasks[task]
                        responses[group][number] = trajectory = task.result()
                        if on_tokens:
                            on_tokens(len(trajectory.token_ids))
                        whole = [each for each in responses[group] if each is not None]
                        if len(whole) == sampling.samples_per_prompt:
                            groups[group] = TrajectoryGroup(prompt=prompts[group], trajectories=tuple(whole))
                            if on_group:
                                on_group(groups[group])
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            _refuse_only_failures(list(groups.values()))
            await self.after_generate(client)
        return [groups[group] for group in range(len(prompts))]

    async def sample(
        self,
        client: httpx2.AsyncClient,
        gate: asyncio.Semaphore,
        sample_id: str,
        token_ids: Sequence[int],
        home: int,  # requests with the same number go to one server
        sampling: SamplingParams,
    ) -> Trajectory:
        """Sample one response. Raises: RunStopped as ``generate``."""
        seed = sampling.request_seed(sample_id)
        async with gate:
            try:
                sampled = await self._sampled(client, home, token_ids, sampling, seed)
            except HttpFailure as failure:
                return self._failed(sample_id, str(failure))
        if not sampled.token_ids or sampled.finish not in ("stop", "length"):
            return self._failed(
                sample_id, f"the sampler ended it after {len(sampled.token_ids)} tokens: {sampled.finish}"
            )
        if len(sampled.token_ids) > sampling.max_response_tokens:
            raise UnusableAnswer(
                f"the sampler gave {len(sampled.token_ids)} tokens, and {sampling.max_response_tokens} is the limit"
            )
        if sampling.prompt_logprobs and len(sampled.prompt_logprobs) != len(token_ids) - 1:
            raise UnusableAnswer(
                f"the sampler gave {len(sampled.prompt_logprobs)} log-probs of a prompt of {len(token_ids)} tokens"
            )
        return Trajectory(
            sample_id=sample_id,
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.logprobs),
            text=str(self.tokenizer.decode(sampled.token_ids, skip_special_tokens=True)),
            stop_reason=self._stop_reason(sampled, sampling),
            policy_version=self._version,
            prompt_logprobs=tuple(sampled.prompt_logprobs),
            experts=self.experts_of(sampled, len(token_ids) + len(sampled.token_ids) - 1),
        )

    def experts_of(self, sampled: SampledResponse, places: int) -> NDArray[np.int16] | None:
        """Return the experts of a response, of so many tokens; None where the run does not need them. Raises: UnusableAnswer."""
        return None

    async def _sampled(
        self, client: httpx2.AsyncClient, home: int, token_ids: Sequence[int], sampling: SamplingParams, seed: int
    ) -> SampledResponse:
        """Query a server; twice where the first token has a distribution of its own and does not end the response."""
        if not sampling.has_own_first:
            path, body = self.protocol.request(token_ids, sampling, seed)
            _, answer = await self.replicas.ask_group(client, home, path, body)
            return self.protocol.read(answer)
        alone = replace(sampling.of_first_token(), max_response_tokens=1)
        first = await self._sampled(client, home, token_ids, alone, seed)
        rest = sampling.max_response_tokens - len(first.token_ids)
        if first.finish != "length" or not rest or self._stop_reason(first, sampling) is StopReason.EOS:
            return first
        others = replace(sampling, first_token_temperature=None, max_response_tokens=rest, prompt_logprobs=False)
        # Another seed, or the second token would be drawn with the number that drew the first.
        second = await self._sampled(client, home, [*token_ids, *first.token_ids], others, seed ^ 1)
        return replace(
            second,
            token_ids=[*first.token_ids, *second.token_ids],
            logprobs=[*first.logprobs, *second.logprobs],
            prompt_logprobs=first.prompt_logprobs,
        )

    def _stop_reason(self, sampled: SampledResponse, sampling: SamplingParams) -> StopReason:
        """Return the stop reason, from the last token, since servers use different words for it."""
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.end_tokens)}
        if sampled.token_ids[-1] in ends:
            return StopReason.EOS
        if sampled.finish == "length":
            return StopReason.LENGTH
        return StopReason.STOP_TEXT if sampling.stop else StopReason.EOS

    def _failed(self, sample_id: str, why: str) -> Trajectory:
        return Trajectory(
            sample_id=sample_id,
            token_ids=(),
            logprobs=(),
            text="",
            stop_reason=StopReason.FAILED,
            policy_version=self._version,
            failure=why,
        )

    def control(self, work: Callable[[httpx2.AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Call the servers for other purposes than sampling, after checking which of them are available.

        Raises: RunStopped when none is; RuntimeError while responses are in progress.
        """
        self._refuse_while_busy()

        async def whole() -> T:
            async with self.replicas.client() as client:
                await self.replicas.probe(client)
                if not self.replicas.current():
                    raise self.replicas.nobody()
                return await work(client)

        return run(whole())


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in an event loop of its own.

    Raises RuntimeError in a thread with a running loop; engines are called from synchronous code.
    """
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose shutdown does not wait for name lookups past their deadline: their threads cannot be ended."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        return None


def _refuse_only_failures(groups: Sequence[TrajectoryGroup]) -> None:
    failures = [t.failure for group in groups for t in group.trajectories if t.stop_reason is StopReason.FAILED]
    if failures and len(failures) == sum(len(group.trajectories) for group in groups):
        raise RunStopped(f"not one of {len(failures)} responses came back from the sampler; the first: {failures[0]}")
