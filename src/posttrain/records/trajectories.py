"""What the sampler hands over: token ids exactly as sampled, with their log-probs and why they ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from posttrain.records.prompts import Prompt


class StopReason(StrEnum):
    EOS = "eos"  # the model ended its turn, or a stop token id was drawn
    STOP_TEXT = "stop_text"  # one of the stop texts appeared
    LENGTH = "length"  # max_response_tokens was reached


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    sample_id: str  # prompt id and sample number, e.g. "train.parquet:17/3"
    token_ids: tuple[int, ...]  # the response, its end token included
    logprobs: tuple[float, ...]  # nats, one per token, of the distribution the token was drawn from
    text: str  # decoded without special tokens
    stop_reason: StopReason
    policy_version: int  # number of updates the sampling weights had seen


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All responses to one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Reward:
    """A finite score, with the value of each term by name."""

    value: float
    terms: tuple[tuple[str, float], ...] = ()


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
