"""Responses of 1 to max_response_tokens tokens that no model made; without torch, so that light ranks can make them, too."""

from __future__ import annotations

import random

from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

FIRST_TOKEN = 20  # of made responses, clear of special tokens
LOGPROB = -1.0  # nats
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
