"""samples/step_N.tokens.jsonl, and the same in validation/: what is known about single tokens of responses, for the report's
token view.

The first line is ``{"texts": {"17": " the", ...}}``, the text of every token id in the file. Then comes a line per row of the
batch, for the first ones of the step: as many as have MAX_TOKENS together. ``line`` is the number (from 0) of the sample in
step_N.jsonl that the row belongs to; a trajectory whose history was edited between turns has several rows. Its columns have an
entry per token, or are one value where all entries are equal:

    token_ids           the response up to the last token that was sampled
    sampled, in_loss    1 where the policy sampled the token; where it enters the loss
    rollout_logprobs    nats, by the sampler
    gap                 nats, rollout log-prob − trainer log-prob; absent where the trainer computed none
    ref_gap             nats, trainer log-prob − reference log-prob; only with a reference
    advantages          reward units; a validation has none, and no in_loss
    importance_weights, rejected      only with rollout correction
    values, returns     reward units; only with a critic
    token_rewards       reward units; only where rewards are placed on tokens (a KL, turns)

Numbers are rounded to 4 significant digits, log-probs to 4 decimals; null was not finite. About 20 bytes per token with a
trainer's log-probs, and 8 more for each further column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.interfaces.row_work import RowReader, as_they_are
from posttrain.records.batches import SequenceBatch, TrainBatch, TrainerLogprobs
from posttrain.records.trajectories import ScoredGroup

MAX_TOKENS = 100_000  # of one file: about 2 MB
DIGITS = 4

TokenTexts = Callable[[Sequence[int]], list[str]]  # ids -> the text of each


def token_values_path(samples: Path) -> Path:
    """step_N.tokens.jsonl, beside step_N.jsonl."""
    return samples.with_suffix(".tokens.jsonl")


def first_groups(groups: Sequence[ScoredGroup], max_tokens: int = MAX_TOKENS) -> Sequence[ScoredGroup]:
    """The groups of a step or a validation that fit into the file: the first ones, up to the group in which its
    tokens are used up. None where no response has a token."""
    tokens = [
        sum(len(sample.token_ids) for trajectory in group.group.trajectories for sample in trajectory.samples)
        for group in groups
    ]
    before = [total - own for total, own in zip(accumulate(tokens), tokens, strict=True)]
    return groups[: sum(count < max_tokens for count in before)] if any(tokens) else []


def token_lines(
    batch: TrainBatch | SequenceBatch,
    trainer_logprobs: Tensor | None,
    token_texts: TokenTexts,
    lines: Sequence[int],
    *,
    token_rewards: Tensor | None = None,
    max_tokens: int = MAX_TOKENS,
    read_rows: RowReader = as_they_are,
) -> list[str]:
    """The lines of the file, without their ends.

    Args: trainer_logprobs [n, T] nats, of the first n rows; None: the trainer computed none. lines [B]: the sample that each
        row belongs to. token_rewards [B, T]; None: none are placed on tokens. read_rows reads the rows of the file.
    """
    sequences, train = (batch.sequences, batch) if isinstance(batch, TrainBatch) else (batch, None)
    lengths = sequences.response_lengths.tolist()
    count = len(list(takewhile(lambda total: total <= max_tokens, accumulate(lengths))))
    logprobs = train.logprobs if train is not None else TrainerLogprobs()
    critic = train.critic if train is not None else None
    whole: dict[str, Tensor | None] = {
        "rollout_logprobs": sequences.rollout_logprobs,
        "trainer_logprobs": trainer_logprobs,
        "ref_logprobs": logprobs.ref,
        "advantages": train.advantages if train is not None else None,
        "importance_weights": logprobs.importance_weights,
        "values": critic.values if critic else None,
        "token_rewards": token_rewards,
        "rejected": logprobs.rejected,
        "versions": sequences.versions,
        "returns": critic.returns if critic else None,
    }
    first = {"ids": sequences.tokens[:count, sequences.prompt_width :]}
    first |= {name: each[:count] for name, each in whole.items() if each is not None}
    first = dict(zip(first, read_rows(list(first.values())), strict=True))
    ids = first["ids"].cpu().numpy()
    columns: dict[str, NDArray[Any]] = {"sampled": _flags(sequences.response_mask[:count])}
    if train is not None:
        columns["in_loss"] = _flags(train.loss_mask[:count])
    rollout = _numbers(first["rollout_logprobs"])
    columns["rollout_logprobs"] = np.round(rollout, DIGITS)
    if train is not None:
        columns["advantages"] = significant(_numbers(first["advantages"]))
    mask = sequences.response_mask[:count].cpu().numpy()
    if "trainer_logprobs" in first:
        trainer = _numbers(first["trainer_logprobs"])
        known = mask[: len(trainer)]
        columns["gap"] = significant(np.where(known, rollout[: len(trainer)] - trainer, 0.0))
        if "ref_logprobs" in first:
            reference = _numbers(first["ref_logprobs"])[: len(trainer)]
            columns["ref_gap"] = significant(np.where(known, trainer - reference, 0.0))
    for name in ("importance_weights", "values", "token_rewards", "rejected", "versions", "returns"):
        if name in first:
            found = first[name]
            flags = found.dtype == torch.bool
            columns[name] = _flags(found) if flags else significant(np.where(mask, _numbers(found), 0.0))
    rows = [
        {"line": lines[row], "sample_id": sequences.sample_ids[row], "token_ids": ids[row, : lengths[row]].tolist()}
        | {name: _packed(values[row, : lengths[row]]) for name, values in columns.items() if row < len(values)}
        for row in range(count)
    ]
    unique = sorted({number for row in range(count) for number in ids[row, : lengths[row]].tolist()})
    texts = dict(zip(map(str, unique), token_texts(unique), strict=True))
    return [
        json.dumps(item, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        for item in [{"texts": texts}, *rows]
    ]


def significant(values: NDArray[np.float64], digits: int = DIGITS) -> NDArray[np.float64]:
    """Rounded to so many significant digits; 0 and what is not finite stay."""
    usable = np.isfinite(values) & (values != 0)
    size = np.floor(np.log10(np.abs(np.where(usable, values, 1.0))))
    # Divided by a power of ten that is exact, where there is one: then the shortest text of the result has ``digits`` digits.
    power = digits - 1 - size
    large, small = 10.0 ** np.clip(power, 0, 300), 10.0 ** np.maximum(-power, 0)
    return np.where(usable, np.round(np.where(usable, values, 1.0) * large / small) / large * small, values)


def _numbers(values: Tensor) -> NDArray[np.float64]:
    return values.detach().double().cpu().numpy()


def _flags(values: Tensor) -> NDArray[np.int64]:
    return values.long().cpu().numpy()


def _packed(values: NDArray[Any]) -> Any:
    """The entries, or the one value that all of them are; None for what is not finite."""
    plain = values.tolist()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        plain = [value if math.isfinite(value) else None for value in plain]
    return plain[0] if plain and plain.count(plain[0]) == len(plain) else plain
