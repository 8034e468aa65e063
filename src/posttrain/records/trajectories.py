"""Responses: token ids exactly as sampled, with their log-probs and stop reasons, and their rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from posttrain.records.prompts import Prompt

if TYPE_CHECKING:  # a plan reads these records, and needs no arrays
    import numpy as np
    from numpy.typing import NDArray

    from posttrain.records.images import PromptImages


GRAMMAR = "grammar"  # failure_reason of a response whose grammar cannot be followed: the request is to blame


class StopReason(StrEnum):
    EOS = "eos"  # the model ended its turn, or a stop token id was drawn
    STOP_TEXT = "stop_text"  # one of the stop texts appeared
    LENGTH = "length"  # max_response_tokens was reached
    FAILED = "failed"  # there is no response: the request for it ran out of time, or its server failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The distribution that responses are drawn from. Draws depend only on ``seed`` and the sample's id, not on the batch."""

    samples_per_prompt: int = 1
    extra_episodes: int = 0  # begun besides, in environments; those of a group that are not over in time are dropped
    max_response_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: bool = False  # report those of the prompt's tokens, too; native and vllm can
    seed: int = 0
    step: int = 0  # of the run, for environments; 0 before the first and outside of training
    first_token_temperature: float | None = None  # None: as of the others
    first_token_top_k: int = 0  # where it has a temperature of its own
    # More, in the engine's own words
    engine_sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_own_first(self) -> bool:
        """True where the first token of a response has a distribution of its own."""
        return self.first_token_temperature is not None

    def of_first_token(self) -> SamplingParams:
        """The distribution of the first token alone."""
        if self.first_token_temperature is None:
            return self
        return replace(
            self,
            temperature=self.first_token_temperature,
            top_k=self.first_token_top_k,
            first_token_temperature=None,
            first_token_top_k=0,
        )

    def stopping_at(self, texts: Iterable[str]) -> SamplingParams:
        """The same with further stop texts."""
        more = tuple(one for one in dict.fromkeys(texts) if one not in self.stop)
        return replace(self, stop=(*self.stop, *more)) if more else self

    def request_seed(self, sample_id: str) -> int:
        """The seed of one response, 0 to 2^31 - 1 (what every server takes): of the seed and the sample's name alone."""
        named = hashlib.blake2b(f"{self.seed}/{sample_id}".encode(), digest_size=4).digest()
        return int.from_bytes(named, "little") >> 1


def mixed_seed(seed: int, number: int) -> int:
    """A seed made of two numbers, far from the seeds of their neighbours."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "little")


class VersionSpan(NamedTuple):
    """Tokens that were sampled with the same weights: from ``first_token`` to the next span or the end."""

    first_token: int
    version: int  # number of updates the weights had seen


class OwnDraws(NamedTuple):
    """Tokens that were drawn from another distribution than the run's: ``first_token`` up to, not with, ``end``."""

    first_token: int
    end: int
    temperature: float
    # Sets of tokens that a grammar left possible, as records.allowed_tokens writes them, and the place in ``allowed`` of each
    # token's; (): no token was excluded
    allowed: tuple[str, ...] = ()
    which: tuple[int, ...] = ()

    def between(self, first: int, end: int) -> OwnDraws | None:
        """Return those from ``first`` up to ``end``, counted from ``first``; None where there are none."""
        start, stop = max(self.first_token, first), min(self.end, end)
        if start >= stop:
            return None
        which = self.which[start - self.first_token : stop - self.first_token]
        return self._replace(first_token=start - first, end=stop - first, which=which)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One action of the policy in an environment, and the world's answer to it."""

    start: int  # token_ids[start:end] of the trajectory are what the policy sampled in this turn
    end: int
    text: str  # the action, as the environment took it
    observation: str = ""  # the answer, as text for people
    reward: float | None = None  # of this turn; it stands on token end - 1. None: this turn has none
    penalty: float = 0.0  # taken from this turn alone where turns are responses, reward units
    stop_reason: StopReason  # of this turn's sampling
    policy_version: int  # the oldest, where tokens differ
    version_spans: tuple[VersionSpan, ...] = ()  # where tokens differ, in tokens of the trajectory
    state_key: str | None = None  # of the state in which the action was taken; equal states have equal keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A response that was taken back while it was sampled, to be continued with newer weights."""

    sample_id: str  # as in its request
    # From a worker, these and the log-probs may lie in a store, as those of a trajectory
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats, one per token, of the distribution it was drawn from
    spans: tuple[VersionSpan, ...]  # the weights of each token; () without tokens
    # The likeliest tokens at each of its tokens, as a trajectory has them; (): not requested
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    # Its keys and values, in the sampler's own form; None: they are computed again, with the weights that continue it
    cache: object = field(default=None, compare=False, repr=False)

    @property
    def has_top_logprobs(self) -> bool:
        return len(self.top_logprobs) == len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One response to a prompt: what was sampled, in one turn or in many, and in between what an environment answered.

    Where an environment's history was edited between turns, the policy did not read one growing text: the trajectory then is
    several samples, each with a prompt of its own. This record is the last of them and ``earlier`` holds the others.
    """

    sample_id: str  # prompt id and sample number, e.g. "train.parquet:17/3"
    # The response: sampled tokens, end tokens included, and an environment's answers in between. From a worker, these and the
    # log-probs may lie in a store, in the form of records.stored_rows.StoredRow, which reads like a tuple.
    token_ids: tuple[int, ...]
    # Nats, one per token, of the distribution it was drawn from; 0 where it was not sampled.
    logprobs: tuple[float, ...]
    text: str  # decoded without special tokens; of several samples, what was said and answered in all of them
    stop_reason: StopReason  # of the last turn; LENGTH also where the context had no room for another
    policy_version: int  # number of updates the sampling weights had seen; the oldest, where tokens differ
    version_spans: tuple[VersionSpan, ...] = ()  # where tokens differ, in order; (): all of them have policy_version
    prompt_logprobs: tuple[float, ...] = ()  # nats, of the prompt's second token to its last; (): not requested
    # At the same tokens, the likeliest ones of the plain distribution (temperature 1, uncut), as below; (): not requested
    prompt_top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    # At each token, the likeliest ones of its distribution with their log-probs, in descending order; (): not requested
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    own_draws: tuple[OwnDraws, ...] = ()  # tokens with a distribution of their own, in order
    # [tokens, layers, chosen] int16, the experts that prompt and response were sent to, but its last token; None: not recorded
    experts: NDArray[np.int16] | None = field(default=None, compare=False, repr=False)
    # Of an environment's messages, up to the last turn; None: it gave none, and a row's images are its prompt's.
    images: PromptImages | None = field(default=None, compare=False, repr=False)
    failure: str = ""  # with FAILED: what happened, in a sentence
    failure_reason: str = ""  # with FAILED: a short word to count by, where it was not the sampler that failed
    response_mask: tuple[bool, ...] = ()  # True on tokens that the policy sampled; (): all of them
    prompt_token_ids: tuple[int, ...] | None = None  # what the first turn read; None: the group's prompt
    prompt_text: str = ""  # the same for people, where it is not the group's prompt
    turns: tuple[Turn, ...] = ()  # (): the one turn of a response without an environment
    earlier: tuple[Trajectory, ...] = ()  # samples before this one, oldest first; they have no earlier ones themselves
    env_reward: float | None = None  # sum of the rewards of all turns; None: the environment gives none
    env_stop: str = ""  # why the environment ended the episode, in its own word
    env_metrics: tuple[tuple[str, float], ...] = ()  # of the episode, by name
    close_failure: str = (
        ""  # the error of closing the environment after the complete episode, whose metrics are lost by it
    )

    def __post_init__(self) -> None:
        if self.response_mask and len(self.response_mask) != len(self.token_ids):
            raise ValueError(f"a mask of {len(self.response_mask)} for {len(self.token_ids)} tokens")

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """The version spans of this sample, written out."""
        return self.version_spans or (VersionSpan(0, self.policy_version),)

    @property
    def oldest_version(self) -> int:
        """The oldest weights that any token of any sample was drawn with: staleness is counted from these."""
        if not self.version_spans and not self.earlier:
            return self.policy_version
        return min(span.version for sample in self.samples for span in sample.spans)

    @property
    def samples(self) -> tuple[Trajectory, ...]:
        """All samples, a row of the batch each, oldest first."""
        return (*self.earlier, self)

    def sampled_between(self, first: int, end: int) -> int:
        """Count the tokens of this sample from ``first`` up to ``end`` that the policy sampled."""
        return self.response_mask[first:end].count(True) if self.response_mask else max(end - first, 0)

    @property
    def sampled_mask(self) -> tuple[bool, ...]:
        """The response mask, written out."""
        return self.response_mask or (True,) * len(self.token_ids)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy has sampled, in all samples."""
        if not self.earlier:
            return sum(self.response_mask) if self.response_mask else len(self.token_ids)
        return sum(sample.sampled_between(0, len(sample.token_ids)) for sample in self.samples)

    @property
    def turn_count(self) -> int:
        return sum(max(len(sample.turns), 1) for sample in self.samples)

    @property
    def turn_texts(self) -> tuple[str, ...]:
        """The policy's actions, turn by turn, in all samples; empty without an environment."""
        if not self.turns and not self.earlier:
            return ()
        return tuple(turn.text for sample in self.samples for turn in sample.turns)


R = TypeVar("R", Trajectory, Unfinished)


def in_memory(response: R) -> R:
    """The response with its tokens and log-probs in tuples: those that lie in a store are read."""
    if type(response.token_ids) is tuple and type(response.logprobs) is tuple:
        return response
    return replace(response, token_ids=tuple(response.token_ids), logprobs=tuple(response.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All responses to one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def first_prompt(self) -> tuple[int, ...]:
        """The token ids that the first response began from: the prompt's, or what an environment made of it."""
        own = self.trajectories[0].samples[0].prompt_token_ids
        return self.prompt.token_ids if own is None else own


@dataclass(frozen=True, slots=True)
class Reward:
    """A finite score, with the value of each term by name, and the texts that terms gave beside theirs (``gsm8k/pred``)."""

    value: float
    terms: tuple[tuple[str, float], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    by_turn: bool = True  # an environment's rewards stand where they were earned; False: all of it is on the last token


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

    @property
    def pairs(self) -> tuple[tuple[Trajectory, Outcome], ...]:
        """Every response with its outcome."""
        return tuple(zip(self.group.trajectories, self.outcomes, strict=True))

    def map_outcomes(self, change: Callable[[Trajectory, Outcome], Outcome]) -> ScoredGroup:
        """The group with other outcomes."""
        return replace(self, outcomes=tuple(change(*pair) for pair in self.pairs))
