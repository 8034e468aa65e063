"""What the sampler hands over: token ids exactly as sampled, with their log-probs and why they ended."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from posttrain.records.prompts import Prompt


class StopReason(StrEnum):
    EOS = "eos"  # the model ended its turn, or a stop token id was drawn
    STOP_TEXT = "stop_text"  # one of the stop texts appeared
    LENGTH = "length"  # max_response_tokens was reached
    FAILED = "failed"  # there is no response: the request for it ran out of time, or its server failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw responses. ``seed`` and the sample's own id fix every draw, whoever shares the batch."""

    samples_per_prompt: int = 1
    max_response_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    engine_sampling: Mapping[str, Any] = field(default_factory=dict)  # more, in the engine's own words

    def request_seed(self, sample_id: str) -> int:
        """The seed of one response, 0 to 2^31 - 1 (what every server takes): of the seed and the sample's name alone."""
        named = hashlib.blake2b(f"{self.seed}/{sample_id}".encode(), digest_size=4).digest()
        return int.from_bytes(named, "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    sample_id: str  # prompt id and sample number, e.g. "train.parquet:17/3"
    token_ids: tuple[int, ...]  # the response, its end token included
    logprobs: tuple[float, ...]  # nats, one per token, of the distribution the token was drawn from
    text: str  # decoded without special tokens
    stop_reason: StopReason
    policy_version: int  # number of updates the sampling weights had seen
    failure: str = ""  # with FAILED: what happened, in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All responses to one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Reward:
    """A finite score, with the value of each term by name, and the texts that terms gave beside theirs (``gsm8k/pred``)."""

    value: float
    terms: tuple[tuple[str, float], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Invalid:
    """No score could be found: ``reason`` is a short word to count by, ``detail`` says what happened."""

    reason: str
    detail: str = ""


Outcome = Reward | Invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group and the outcome of each of its responses, in the same order."""

    group: TrajectoryGroup
    outcomes: tuple[Outcome, ...]
    kept: bool = True  # False: it has no part in the loss, and is here to be looked at

    def __post_init__(self) -> None:
        if len(self.outcomes) != len(self.group.trajectories):
            raise ValueError(f"{len(self.outcomes)} outcomes for {len(self.group.trajectories)} responses")
