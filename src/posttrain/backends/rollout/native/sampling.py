"""Drawing of tokens from logits, with their log-probs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from posttrain.backends.rollout.native.kernels import DTYPES, Kernels, load_kernels
from posttrain.records.trajectories import SamplingParams

BLOCK = 128  # tokens per partial sum of probabilities
CANDIDATES = 1024  # likeliest tokens that top-p looks at first
MORE_CANDIDATES = 8  # times as many afterwards
LOGIT_ROWS = {"cpu": 64}  # rows of logits processed at a time, so that they stay in a processor's cache
MOST_LOGIT_ROWS = 256  # elsewhere, for the sake of memory: 0.6 GB for 152,000 tokens


def logit_rows(device: torch.device) -> int:
    """Return how many rows of logits are processed at a time."""
    return LOGIT_ROWS.get(device.type, MOST_LOGIT_ROWS)


def uniforms(seed: int, sample_id: str, count: int) -> np.ndarray:
    """Return the random numbers of one response, [count] in [0, 1): number t draws token t.

    They depend only on the seed and the sample's id, so a response does not depend on the batch.
    """
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def draw(logits: Tensor, random: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    The logits are divided by the temperature, then cut by top-k, top-p and min-p in this order, each applied to the result of
    the previous one. The log-prob is that of the resulting distribution. At temperature 0 the most likely token is taken,
    with its log-prob at temperature 1, uncut.

    Args: logits [B, vocabulary]; random [B] float in [0, 1).
    Returns: tokens [B] int64, logprobs [B] float32 nats; NaN where a row holds NaN or inf.
    """
    kernels = _draw_kernels(logits.dtype) if logits.device.type == "cpu" else None
    greedy = sampling.temperature == 0
    if kernels is not None and (greedy or not _restricts(sampling, logits.shape[1])):
        return kernels.draw(logits, random, sampling.temperature)
    logits = logits.float()
    if greedy:
        tokens = logits.argmax(dim=1)
        return tokens, logprob_of(logits, tokens)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    kernels = _draw_kernels(logits.dtype) if kernels is not None else None
    if kernels is not None:
        return kernels.draw(restrict(logits, sampling), random, 1.0)
    return _from_weights(restrict(logits, sampling).softmax(dim=1), random)


@cache
def _draw_kernels(dtype: torch.dtype) -> Kernels | None:
    """Return the kernels that draw from logits of ``dtype`` on a CPU; None where there are none."""
    found = load_kernels(dtype) if dtype in DTYPES else None
    return found if isinstance(found, Kernels) else None


def draw_next(
    logits: Tensor, random: Tensor, sampling: SamplingParams, begins: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Draw one token per row as ``draw``; where a response begins, its first token may have a distribution of its own.

    Args: begins [B], the row's token is the first of its response.
    """
    if not sampling.has_own_first or not any(begins):
        return draw(logits, random, sampling)
    first, own = torch.tensor(list(begins), device=logits.device), draw(logits, random, sampling.of_first_token())
    if all(begins):
        return own
    others = draw(logits, random, sampling)
    return torch.where(first, own[0], others[0]), torch.where(first, own[1], others[1])


def draw_rows(
    logits: Tensor, random: Tensor, samplings: Sequence[SamplingParams], begins: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Draw one token per row as ``draw_next``, each row from its own distribution; rows with equal ones are drawn together.

    Args: samplings, begins [B].
    """
    groups: list[tuple[SamplingParams, list[int]]] = []
    for row, sampling in enumerate(samplings):
        rows = next((rows for known, rows in groups if known is sampling or known == sampling), None)
        if rows is None:
            groups.append((sampling, [row]))
        else:
            rows.append(row)
    if len(groups) == 1:
        return draw_next(logits, random, samplings[0], begins)
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(samplings), dtype=torch.float32, device=logits.device)
    for sampling, rows in groups:
        at = torch.tensor(rows, device=logits.device)
        tokens[at], logprobs[at] = draw_next(logits[at], random[at], sampling, [begins[row] for row in rows])
    return tokens, logprobs


def likeliest(logits: Tensor, sampling: SamplingParams, count: int) -> tuple[tuple[int, float], ...]:
    """Return the likeliest tokens of the distribution that ``draw`` reports log-probs of, with these, in descending order: at
    most ``count``, and none that is excluded. Args: logits [vocabulary]."""
    rows = logits.float()[None]
    if sampling.temperature != 0:
        rows = restrict(rows / sampling.temperature, sampling)
    values, tokens = rows.log_softmax(dim=1)[0].topk(min(count, rows.shape[1]))
    found = zip(tokens.tolist(), values.tolist(), strict=True)
    return tuple((token, value) for token, value in found if value > -math.inf)


def _from_weights(weights: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution at ``random``. Returns: the tokens, and their log-probs. The weights are probabilities,
    up to the rounding of their sum.

    The vocabulary is summed in blocks and only one block is searched: most of the vocabulary is read once. Staying just below
    each sum, with right=True, never selects a token of weight 0, for any rounding of the sums.
    """
    rows, vocabulary = weights.shape
    short = -vocabulary % BLOCK
    blocks = (pad(weights, (0, short)) if short else weights).view(rows, -1, BLOCK)
    cumulative = blocks.sum(dim=2).cumsum(dim=1)
    total = cumulative[:, -1:]
    point = _below(random.to(total)[:, None] * total, total)
    # NaN exceeds the last index.
    block = torch.searchsorted(cumulative, point, right=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=weights.device), block[:, 0]].cumsum(dim=1)
    place = torch.searchsorted(inside, _below(point - before, inside[:, -1:]), right=True).clamp(max=BLOCK - 1)
    tokens = (block * BLOCK + place).clamp(max=vocabulary - 1)
    return tokens[:, 0], (weights.gather(1, tokens).log() - total.log())[:, 0]


def _below(value: Tensor, bound: Tensor) -> Tensor:
    return torch.minimum(value, torch.nextafter(bound, torch.zeros_like(bound)))


def _restricts(sampling: SamplingParams, vocabulary: int) -> bool:
    """Return True where top-k, top-p or min-p may exclude a token."""
    return 0 < sampling.top_k < vocabulary or sampling.top_p < 1 or sampling.min_p > 0


def restrict(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Set the logits of tokens that top-k, top-p and min-p exclude to -inf. The most likely token always stays."""
    if 0 < sampling.top_k < logits.shape[1]:
        smallest = logits.topk(sampling.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        logits = _nucleus(logits, sampling.top_p)
    if sampling.min_p > 0:
        probabilities = logits.softmax(dim=1)
        weakest = sampling.min_p * probabilities.amax(dim=1, keepdim=True)
        logits = logits.masked_fill(probabilities < weakest, -torch.inf)
    return logits


def _nucleus(logits: Tensor, top_p: float, candidates: int = CANDIDATES) -> Tensor:
    """Set the logits of tokens to -inf whose more likely ones, by logit and then by number, have a probability of top_p together.

    Only the likeliest tokens are sorted, more of them where these do not show which, and at last all: a whole vocabulary takes
    longer to sort than to compute.
    """
    few = min(candidates, logits.shape[1])
    values, tokens = logits.topk(few, dim=1, sorted=False)
    tokens, by_number = tokens.sort(dim=1)
    ordered, order = values.gather(1, by_number).sort(dim=1, descending=True, stable=True)
    probabilities = (ordered - logits.logsumexp(dim=1, keepdim=True)).exp()
    before = probabilities.cumsum(dim=1) - probabilities  # probability of all more likely tokens
    beyond = before >= top_p
    beyond[:, 0] = False  # a top_p that float32 rounds to 0 keeps one token, too
    kept = ordered.masked_fill(beyond, -torch.inf)
    found = torch.full_like(logits, -torch.inf).scatter_(1, tokens.gather(1, order), kept)
    # Tokens beside the candidates may have the logit of the last candidate: what stays must come before those.
    least = ordered.masked_fill(beyond, torch.inf).amin(dim=1)
    unclear = (~(beyond[:, -1] & (least > ordered[:, -1]))).nonzero()[:, 0]
    if len(unclear):
        more = MORE_CANDIDATES * candidates
        again = partial(_nucleus, candidates=more) if 2 * more < logits.shape[1] else _nucleus_of_all
        found[unclear] = again(logits[unclear], top_p)
    return found


def _nucleus_of_all(logits: Tensor, top_p: float) -> Tensor:
    """Do as ``_nucleus``, by sorting the vocabulary."""
    # Probabilities may tie where logits do not
    sorted_logits, order = logits.sort(dim=1, descending=True, stable=True)
    ordered = sorted_logits.softmax(dim=1)
    before = ordered.cumsum(dim=1) - ordered
    beyond = before >= top_p
    beyond[:, 0] = False
    forbidden = torch.zeros_like(ordered, dtype=torch.bool).scatter(1, order, beyond)
    return logits.masked_fill(forbidden, -torch.inf)


def logprob_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log softmax at one token per row. Args: logits [B, vocabulary], tokens [B] int64. Returns: [B], nats."""
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(dim=1)
