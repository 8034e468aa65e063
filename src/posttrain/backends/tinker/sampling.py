"""Sampling for Tinker's clients: requests for the same weights share batches."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from posttrain.backends.tinker.adapters import Adapter
from posttrain.backends.tinker.requests import Sampled, SampleRequest, SampleResult, Top
from posttrain.backends.tinker.training import Scorers
from posttrain.data.chat_api import Refused
from posttrain.interfaces.rollout_engine import Request, RolloutEngine
from posttrain.records.batches import SequenceBatch
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

_WAIT_S = 3600.0  # longer than any wait between two finished responses


class ClientSampling:
    """Samples from the base model with any adapter. For the thread that uses the model.

    Args: make_engine builds an engine on the model as it is: one for the plain output layer, one for an adapted one.
    """

    def __init__(self, scorers: Scorers, make_engine: Callable[[], RolloutEngine], *, context: int, most_tokens: int):
        self._scorers = scorers
        self._make_engine = make_engine
        self._engines: dict[bool, RolloutEngine] = {}
        self._version = 0
        self.context = context
        self.most_tokens = most_tokens  # of a response whose request has no limit

    def check(self, request: SampleRequest, vocabulary: int) -> None:
        """Raises: Refused for a request that the model cannot answer."""
        if not request.prompt:
            raise Refused("the prompt is empty")
        if not all(0 <= token < vocabulary for token in (*request.prompt, *request.stop_token_ids)):
            raise Refused(f"the request holds a token outside of 0 to {vocabulary - 1}")
        if len(request.prompt) + (request.max_tokens or 1) > self.context:
            raise Refused(
                f"a prompt of {len(request.prompt)} tokens and max_tokens={request.max_tokens or 1} exceed the context of "
                f"{self.context}"
            )
        if max(request.top_prompt, request.top_sampled) > vocabulary:
            raise Refused(f"more log-probs per position are requested than the vocabulary has tokens, {vocabulary}")

    def sample(self, adapter: Adapter | None, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Sample all responses of requests that agree in ``sampling_key``."""
        scorer = self._scorers.of(adapter)
        engine = self._engine(adapter)
        trajectories: dict[str, Trajectory] = {}
        with engine.open_stream(sampling_key(requests[0])) as stream:
            stream.submit([each for number, request in enumerate(requests) for each in self._requests(number, request)])
            wanted = sum(request.num_samples for request in requests)
            while len(trajectories) < wanted:
                trajectories |= {each.sample_id: each for each in stream.wait(_WAIT_S)}
        results = []
        for number, request in enumerate(requests):
            found = [trajectories[f"{number}/{place}"] for place in range(request.num_samples)]
            if failed := next((each for each in found if each.stop_reason is StopReason.FAILED), None):
                raise RuntimeError(f"the sampler failed: {failed.failure}")
            results.append(self._result(request, found, lambda tokens, k: _top(scorer.top_logprobs, tokens, k)))
        return results

    def _engine(self, adapter: Adapter | None) -> RolloutEngine:
        adapted = self._scorers.model.output_adapted(adapter)
        if adapted not in self._engines:
            self._engines[adapted] = self._make_engine()
        self._version += 1
        self._engines[adapted].weights_changed(self._version)
        return self._engines[adapted]

    def _requests(self, number: int, request: SampleRequest) -> list[Request]:
        room = self.context - len(request.prompt)
        seed = secrets.randbits(31) if request.seed is None else request.seed
        return [
            Request(
                sample_id=f"{number}/{place}",
                token_ids=request.prompt,
                max_response_tokens=min(room, request.max_tokens or self.most_tokens),
                seed=seed,
                draws_as=str(place),
            )
            for place in range(request.num_samples)
        ]

    def _result(
        self, request: SampleRequest, found: Sequence[Trajectory], top: Callable[[tuple[int, ...], int], Top]
    ) -> SampleResult:
        size = len(request.prompt)
        first = size - (request.last_prompt_logprobs or size)
        prompt: list[float | None] | None = None
        if request.prompt_logprobs:
            prompt = [None, *found[0].prompt_logprobs]
            prompt[:first] = [None] * first
        top_prompt: list[Sequence[tuple[int, float]] | None] | None = None
        if request.top_prompt:
            top_prompt = [None] * max(1, first)
            top_prompt += [*top(request.prompt, request.top_prompt)][max(1, first) - 1 :] if size > 1 else []
        sequences = []
        for each in found:
            of_tokens = top((*request.prompt, *each.token_ids), request.top_sampled) if request.top_sampled else None
            sequences.append(
                Sampled(
                    tokens=each.token_ids,
                    logprobs=each.logprobs,
                    stop_reason="length" if each.stop_reason is StopReason.LENGTH else "stop",
                    top=None if of_tokens is None else [*of_tokens][size - 1 :],
                )
            )
        return SampleResult(sequences=tuple(sequences), prompt_logprobs=prompt, top_prompt=top_prompt)


def sampling_key(request: SampleRequest) -> SamplingParams:
    """Return the distribution of a request; requests with equal ones are sampled together."""
    return SamplingParams(
        max_response_tokens=1,  # each request has its own
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignores_end,
        prompt_logprobs=request.prompt_logprobs,
    )


def _top(score: Callable[[SequenceBatch, float, int], Tensor], tokens: tuple[int, ...], k: int) -> Top:
    """Return the k most likely tokens at every position but the first."""
    batch = SequenceBatch(
        tokens=torch.tensor([tokens]),
        prompt_lengths=torch.tensor([1]),
        response_mask=torch.ones(1, len(tokens) - 1, dtype=torch.bool),
        rollout_logprobs=torch.zeros(1, len(tokens) - 1),
        group_index=torch.tensor([0]),
        trajectory_index=torch.tensor([0]),
        sample_ids=("0",),
    )
    found = score(batch, 1.0, k)[0]  # [T, 2, k]
    return [list(zip(map(int, ids), values, strict=True)) for ids, values in found.tolist()]
