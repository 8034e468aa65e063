"""Responses of 1 to max_response_tokens tokens that no model made; without torch, so that light ranks can make them, too."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from posttrain.interfaces.rollout_engine import OnTokens, Request
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, Unfinished, VersionSpan

FIRST_TOKEN = 20  # of made responses, clear of special tokens
LOGPROB, REFERENCE_LOGPROB = -1.0, -1.25  # nats
VALUE = 0.25  # of a critic, reward units


class NullSamples:
    """Responses for one set of sampling parameters. Their lengths are uniform."""

    def __init__(self, sampling: SamplingParams, version: int):
        self._longest, self._count, self._version = sampling.max_response_tokens, sampling.samples_per_prompt, version
        self._tokens = tuple(FIRST_TOKEN + number % 64 for number in range(self._longest))
        self._logprobs = (LOGPROB,) * self._longest
        self._text = "7 " * (self._longest // 2)

    def of(self, prompt: Prompt, draw: random.Random) -> tuple[Trajectory, ...]:
        """The responses to a prompt."""
        lengths = [draw.randint(1, self._longest) for _ in range(self._count)]
        return tuple(
            Trajectory(
                sample_id=f"{prompt.prompt_id}/{number}",
                token_ids=self._tokens[:length],
                logprobs=self._logprobs[:length],
                text=self._text[:length],
                stop_reason=StopReason.LENGTH if length == self._longest else StopReason.EOS,
                policy_version=self._version,
            )
            for number, length in enumerate(lengths)
        )


PASS_S = 0.05  # of a stream
TOKENS_A_PASS = 8  # of each response


class NullStream:
    """See interfaces.rollout_engine.ResumableStream: responses that grow with the clock, as those of a model would. Their lengths
    depend on their names."""

    slots = 1 << 16

    def __init__(self, version: int, on_tokens: OnTokens | None):
        self._version, self._on_tokens = version, on_tokens
        self._requests: dict[str, Request] = {}
        self._grown: dict[str, Unfinished] = {}
        self.passes = 0

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._requests[request.sample_id] = request
            begun = request.begun or Unfinished(sample_id=request.sample_id, token_ids=(), logprobs=(), spans=())
            self._grown[request.sample_id] = replace(begun, sample_id=request.sample_id)

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        until, last = time.monotonic() + timeout_s, None if passes is None else self.passes + passes
        ended: list[Trajectory] = []
        while self._requests and not ended and self.passes != last:
            time.sleep(PASS_S)
            self.passes += 1
            ended = [found for name in list(self._requests) if (found := self._passed(name))]
            if time.monotonic() >= until:
                break
        return ended

    def _passed(self, name: str) -> Trajectory | None:
        """Add a pass's tokens to a response. Returns: the response, once it has ended."""
        request, begun = self._requests[name], self._grown[name]
        longest = request.max_response_tokens
        length = random.Random(request.draw_name).randint(1, longest)
        added = min(TOKENS_A_PASS, length - len(begun.token_ids))
        spans = begun.spans
        if not spans or spans[-1].version != self._version:
            spans = (*spans, VersionSpan(len(begun.token_ids), self._version))
        grown = replace(
            begun,
            token_ids=(*begun.token_ids, *(FIRST_TOKEN,) * added),
            logprobs=(*begun.logprobs, *(LOGPROB,) * added),
            spans=spans,
        )
        self._grown[name] = grown
        if self._on_tokens:
            self._on_tokens(added)
        if len(grown.token_ids) < length:
            return None
        self.cancel([name])
        return Trajectory(
            sample_id=name,
            token_ids=grown.token_ids,
            logprobs=grown.logprobs,
            text="7 " * (length // 2),
            stop_reason=StopReason.LENGTH if length == longest else StopReason.EOS,
            policy_version=spans[0].version,
            version_spans=spans if len(spans) > 1 else (),
        )

    def progress(self, since: Mapping[str, int]) -> list[Unfinished]:
        found = []
        for name, start in since.items():
            each = self._grown.get(name)
            if each is not None and len(each.token_ids) > start:
                found.append(replace(each, token_ids=each.token_ids[start:], logprobs=each.logprobs[start:]))
        return found

    def take_back(self, *, keep_cache: bool = False) -> list[Unfinished]:
        found = list(self._grown.values())
        self.close()
        return found

    def cancel(self, sample_ids: Collection[str]) -> None:
        for name in sample_ids:
            self._requests.pop(name, None)
            self._grown.pop(name, None)

    def close(self) -> None:
        self._requests.clear()
        self._grown.clear()
