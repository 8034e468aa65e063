"""Bookkeeping of the native stream: prompts, responses, and their slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.backends.rollout.native.sampling import draw_rows, likeliest
from posttrain.backends.rollout.native.slots import Past
from posttrain.interfaces.rollout_engine import Request
from posttrain.libraries.grammars import GrammarPlace
from posttrain.records.allowed_tokens import to_text
from posttrain.records.images import PromptImages
from posttrain.records.trajectories import (
    GRAMMAR,
    OwnDraws,
    SamplingParams,
    StopReason,
    Trajectory,
    Unfinished,
    VersionSpan,
)

Item = TypeVar("Item")
PromptKey = tuple[tuple[int, ...], str, str, int]
Likeliest = tuple[tuple[tuple[int, float], ...], ...]
UNSCORED = -1


@dataclass(slots=True, eq=False)
class PromptState:
    """A prompt of one or more responses, with its slot's state."""

    token_ids: tuple[int, ...]
    images: PromptImages | None = None
    owner: str = ""  # the one response that may read it, because its cache is not that of the current weights; "": any
    stem: int = 0  # leading tokens that are computed once for all prompts that begin with them; 0: none are shared
    users: int = 0  # responses that wait or are in progress
    shift: int = 0  # of the positions after it: see models.vision.position_shift
    logits: Tensor | None = None  # [vocabulary], of the first token of a response; None until it is prefilled
    # Likeliest tokens to report beside the log-prob of each token but the first; UNSCORED: none of these are requested
    scored: int = UNSCORED
    logprobs: tuple[float, ...] = ()
    top: Likeliest = ()
    experts: NDArray[np.int16] | None = None  # [tokens, layers, chosen], when recorded

    @property
    def key(self) -> PromptKey:
        """Equal for prompts with equal tokens, images, owner and scores."""
        return self.token_ids, self.images.content_hash if self.images else "", self.owner, self.scored

    @property
    def stem_tokens(self) -> tuple[int, ...]:
        return self.token_ids[: self.stem]


@dataclass(slots=True, eq=False)
class Response:
    """A request and its progress."""

    request: Request
    prompt: PromptState
    random: np.ndarray  # [max_response_tokens], one number per draw
    number: int  # in the order of submission
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # Likeliest tokens at each place, where requested.
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    begun: int = 0  # leading tokens that were sampled before, and are in its prompt's slot
    stop_reason: StopReason | None = None
    grammar: GrammarPlace | None = None  # that it is kept within
    allowed: list[bytes] = field(default_factory=list)  # the tokens that it left possible at each place, a bit for each
    experts: list[NDArray[np.int16]] = field(
        default_factory=list
    )  # of the tokens drawn here but the newest, when recorded

    @property
    def all_experts(self) -> NDArray[np.int16] | None:
        """[tokens, layers, chosen] of prompt and response but the newest token; None where they were not recorded."""
        prompt = self.prompt.experts
        return None if prompt is None else np.concatenate([prompt, *(chosen[None] for chosen in self.experts)])

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in its slot: all that were drawn in this stream but the newest."""
        return max(len(self.token_ids) - self.begun - 1, 0)

    @property
    def kept(self) -> Kept | None:
        """The cache that it was continued with; None where its tokens are computed again."""
        cache = self.request.begun.cache if self.request.begun else None
        return cache if isinstance(cache, Kept) else None

    @property
    def unfinished(self) -> Unfinished:
        """The progress so far. Weights that no token was drawn with have no span."""
        return self.since(0)

    def since(self, first: int) -> Unfinished:
        """The progress with the tokens from ``first`` on, and all spans."""
        count = len(self.token_ids)
        return Unfinished(
            sample_id=self.request.sample_id,
            token_ids=tuple(self.token_ids[first:]),
            logprobs=tuple(self.logprobs[first:]),
            spans=tuple(span for span in self.spans if span.first_token < count),
            top_logprobs=tuple(self.top[first:]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Cached keys and values of a conversation between two turns, or of a response that is to be continued."""

    token_ids: tuple[int, ...]
    past: Past  # of these tokens
    shift: int = 0  # of the positions after its prompt, as PromptState has it


def begin_response(request: Request, prompt: PromptState, random: np.ndarray, *, number: int, version: int) -> Response:
    """Begin a response, or continue one, with weights of this version."""
    response = Response(request, prompt, random, number)
    if request.begun is not None:
        response.token_ids, response.logprobs = list(request.begun.token_ids), list(request.begun.logprobs)
        response.spans, response.begun = list(request.begun.spans), len(request.begun.token_ids)
        response.top = list(request.begun.top_logprobs) if request.top_logprobs else []
    if not response.spans or response.spans[-1].version != version:
        response.spans.append(VersionSpan(response.begun, version))
    return response


def draw_next_tokens(responses: Sequence[Response], logits: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw the next token of each response, by its request's sampling parameters or else by ``sampling``, the stream's, and note
    the likeliest tokens where they are requested.

    Args: logits [B, vocabulary]. Returns: as ``draw``.
    """
    logits = _within_grammars(responses, logits)
    random = torch.tensor([one.random[len(one.token_ids)] for one in responses], device=logits.device)
    samplings = [one.request.sampling or sampling for one in responses]
    for row, (response, own) in enumerate(zip(responses, samplings, strict=True)):
        if count := response.request.top_logprobs:
            here = own if response.token_ids else own.of_first_token()
            response.top.append(likeliest(logits[row], here, count))
    return draw_rows(logits, random, samplings, [not one.token_ids for one in responses])


def _within_grammars(responses: Sequence[Response], logits: Tensor) -> Tensor:
    """Return the logits with those of tokens that a response's grammar does not allow set to -inf."""
    if not any(one.grammar for one in responses):
        return logits
    logits = logits.float()
    for row, response in enumerate(responses):
        if response.grammar is not None:
            allowed = response.grammar.allowed()
            response.allowed.append(np.packbits(allowed, bitorder="little").tobytes())
            logits[row] = logits[row].masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)
    return logits


def stop_reason(
    response: Response, sampling: SamplingParams, end_tokens: frozenset[int], tokenizer: PreTrainedTokenizerBase
) -> StopReason | None:
    """Return the reason for which a response ends with its newest token; None when it does not end.

    Args: sampling, the stream's, for requests without parameters of their own.
    """
    sampling = response.request.sampling or sampling
    token = response.token_ids[-1]
    if response.grammar is not None:
        response.grammar.take(token)
        if response.grammar.problem:
            return StopReason.FAILED
    if token in sampling.stop_token_ids or (token in end_tokens and not sampling.ignore_eos):
        return StopReason.EOS
    if sampling.stop:
        # At most b tokens spell a text of b bytes; a few more cover a character cut in two.
        tail = max(len(text.encode()) for text in sampling.stop) + 8
        recent = tokenizer.decode(response.token_ids[-tail:], skip_special_tokens=False)
        if any(text in recent for text in sampling.stop):
            return StopReason.STOP_TEXT
    if len(response.token_ids) >= response.request.max_response_tokens:
        return StopReason.LENGTH
    return None


def follow_grammar(response: Response, grammar: GrammarPlace) -> None:
    """Keep a response within a grammar, from its beginning; tokens that it has already are taken in."""
    for token in response.token_ids:
        response.allowed.append(np.packbits(grammar.allowed(), bitorder="little").tobytes())
        grammar.take(token)
    response.grammar = grammar


def own_draws(response: Response, sampling: SamplingParams) -> tuple[OwnDraws, ...]:
    """Return the tokens of a response that were drawn from another distribution than ``sampling``, the stream's."""
    own = response.request.sampling or sampling
    if not response.allowed and own.temperature == sampling.temperature:
        return ()
    places = {packed: place for place, packed in enumerate(dict.fromkeys(response.allowed))}
    return (
        OwnDraws(
            first_token=0,
            end=len(response.token_ids),
            temperature=own.temperature,
            allowed=tuple(map(to_text, places)),
            which=tuple(places[packed] for packed in response.allowed),
        ),
    )


def trajectory_of(response: Response, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> Trajectory:
    """Return an ended response as a trajectory. Args: sampling, the stream's."""
    assert response.stop_reason is not None
    failed = response.stop_reason is StopReason.FAILED
    return Trajectory(
        sample_id=response.request.sample_id,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(response.logprobs),
        text=str(tokenizer.decode(response.token_ids, skip_special_tokens=True)),
        stop_reason=response.stop_reason,
        policy_version=min(span.version for span in response.spans),
        version_spans=tuple(response.spans) if len(response.spans) > 1 else (),
        prompt_logprobs=response.prompt.logprobs,
        prompt_top_logprobs=response.prompt.top,
        top_logprobs=tuple(response.top),
        own_draws=own_draws(response, sampling),
        experts=response.all_experts,
        failure=f"its grammar cannot be followed: {response.grammar.problem}" if failed and response.grammar else "",
        failure_reason=GRAMMAR if failed else "",
    )


def prompt_of(request: Request, sampling: SamplingParams, *, whole: bool = False) -> PromptState:
    """Return the state of a request's prompt, not prefilled. Requests whose prompts have equal keys share one.

    Args: whole: the prompt is prefilled from its first token, also where another one begins with the same tokens.
    """
    owner = request.sample_id if request.begun and request.begun.cache is not None else ""
    scored = request.top_logprobs if request.prompt_logprobs else 0 if sampling.prompt_logprobs else UNSCORED
    # Equal tokens may belong to other images, keys and values to older weights, and log-probs are wanted of every token.
    shares = not whole and not owner and request.images is None and scored == UNSCORED
    stem = len(request.token_ids) if shares else 0
    return PromptState(request.all_tokens, request.images, owner, stem, scored=scored)


def first_logits(responses: list[Response]) -> Tensor:
    """Return the logits of the first token of each response."""
    found = [response.prompt.logits for response in responses]
    return torch.stack(cast(list[Tensor], found))  # all are prefilled


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Count the common leading tokens of two sequences."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(place for place in range(shorter) if one[place] != other[place])


def close_gaps(
    items: list[Item], *, gone: Callable[[Item], bool], move: Callable[[int, int, Item], None]
) -> list[Item]:
    """Return the items that stay, in slots 0, 1, ...: the last one moves into each gap, from slot ``source`` to ``target``."""
    items = list(items)
    slot = 0
    while slot < len(items):
        if not gone(items[slot]):
            slot += 1
            continue
        last = items.pop()
        if slot < len(items):
            if not gone(last):
                move(len(items), slot, last)
            items[slot] = last
    return items
