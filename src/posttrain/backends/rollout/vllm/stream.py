"""Request stream of a vLLM in this process: requests join while others are being sampled."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

from posttrain.backends.serving.images import check_same_prompt, unexpanded
from posttrain.data.images import decode
from posttrain.interfaces.rollout_engine import OnTokens, Request, check_requests
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory


class StreamingEngine(Protocol):
    """The engine that a stream drives (vllm.in_process.VllmInProcessEngine)."""

    llm: Any  # vllm.LLM
    adapter: Any  # vLLM's request for the adapter that is served; None: the model as it is

    def params(self, sampling: SamplingParams, seed: int) -> Any: ...

    def trajectory(self, sample_id: str, output: Any, sampling: SamplingParams) -> Trajectory: ...

    def joined(self, first: Trajectory, rest: Trajectory) -> Trajectory: ...

    def image_token(self) -> int: ...

    def rest(self) -> None: ...


class VllmStream:
    """See interfaces.rollout_engine.RequestStream."""

    def __init__(self, engine: StreamingEngine, sampling: SamplingParams, on_tokens: OnTokens | None):
        self.closed = False
        self._engine = engine
        self._vllm = engine.llm.llm_engine
        self._sampling = sampling
        self._on_tokens = on_tokens
        self._in_flight: dict[str, str] = {}  # sample ids by vLLM's request names
        self._first: dict[str, Request] = {}  # those whose first token alone is requested, by vLLM's names
        self._begun: dict[str, Trajectory] = {}  # first tokens of those that are continued, by vLLM's names
        self._with_images: dict[str, list[int]] = {}  # their token ids as the trainer reads them, by vLLM's names
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    def submit(self, requests: Sequence[Request]) -> None:
        if self.closed:
            raise RuntimeError("the stream is closed")
        check_requests(requests, self._in_flight.values())
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> str:
        """Submit one request without checks. Returns: vLLM's name for it."""
        self._count += 1
        name = str(self._count)
        sampling = replace(self._sampling, max_response_tokens=request.max_response_tokens)
        if sampling.has_own_first:
            self._first[name] = request
            sampling = replace(sampling.of_first_token(), max_response_tokens=1)
        self._send(name, request, (), sampling, sampling.request_seed(request.sample_id))
        self._in_flight[name] = request.sample_id
        return name

    def _send(self, name: str, request: Request, further: Sequence[int], sampling: SamplingParams, seed: int) -> None:
        """Args: further tokens behind the request's."""
        token_ids = [*request.token_ids, *further]
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
        if request.images is not None:
            prompt["prompt_token_ids"] = unexpanded(token_ids, self._engine.image_token(), request.images)
            prompt["multi_modal_data"] = {"image": [decode(file) for file in request.images.files]}
            self._with_images[name] = token_ids
        params = self._engine.params(sampling, seed)
        self._vllm.add_request(name, prompt, params, lora_request=self._engine.adapter)

    def _continues(self, name: str, first: Trajectory) -> bool:
        """Request the rest of a response whose first token had a distribution of its own; False where nothing follows it. vLLM
        may use a request's name again once it has ended."""
        request = self._first.pop(name, None)
        if request is None or first.stop_reason is not StopReason.LENGTH or request.max_response_tokens == 1:
            return False
        self._begun[name] = first
        rest = request.max_response_tokens - 1
        sampling = replace(
            self._sampling, max_response_tokens=rest, first_token_temperature=None, prompt_logprobs=False
        )
        # Another seed, or the second token would be drawn with the number that drew the first.
        seed = sampling.request_seed(request.sample_id) ^ 1
        self._send(name, request, first.token_ids, sampling, seed)
        return True

    def step(self) -> list[tuple[str, Trajectory]]:
        """Run one step of vLLM's scheduler. Returns: the ended requests, by vLLM's names."""
        ended = []
        for output in self._vllm.step():
            if not output.finished or output.request_id not in self._in_flight:
                continue  # an aborted request may be reported once more
            sample_id = self._in_flight.pop(output.request_id)
            if token_ids := self._with_images.pop(output.request_id, None):
                check_same_prompt(output.prompt_token_ids, token_ids, "vLLM")
            trajectory = self._engine.trajectory(sample_id, output, self._sampling)
            if self._continues(output.request_id, trajectory):
                self._in_flight[output.request_id] = sample_id
                continue
            if first := self._begun.pop(output.request_id, None):
                trajectory = self._engine.joined(first, trajectory)
            if self._on_tokens:
                self._on_tokens(len(trajectory.token_ids))
            ended.append((output.request_id, trajectory))
        return ended

    def wait(self, timeout_s: float) -> list[Trajectory]:
        end = time.monotonic() + timeout_s
        while self._in_flight:
            ended = self.step()
            if ended or time.monotonic() >= end:
                return [trajectory for _, trajectory in ended]
        return []

    def cancel(self, sample_ids: Collection[str]) -> None:
        gone = [name for name, sample_id in self._in_flight.items() if sample_id in sample_ids]
        if gone:
            self._vllm.abort_request(gone)
        for name in gone:
            del self._in_flight[name]
            self._first.pop(name, None)
            self._begun.pop(name, None)
            self._with_images.pop(name, None)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.cancel(frozenset(self._in_flight.values()))
            self._engine.rest()
