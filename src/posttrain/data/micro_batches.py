"""Split of a batch into micro-batches, by number of sequences or by a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from posttrain.algos.balancing import token_budget_parts
from posttrain.data.packing import rows_sharing_a_prompt
from posttrain.errors import Problem, RequestError
from posttrain.records.batches import SequenceBatch


def micro_batches(
    batch: SequenceBatch,
    sequences: int | None,
    max_tokens: int | None = None,
    *,
    share_prompts: bool = True,
    rows_together: int = 1,
) -> list[list[int]]:
    """Return the row numbers of each micro-batch; every row is in one. ``max_tokens`` takes precedence over ``sequences``.

    By count: rows in order, ``sequences`` at a time; the last part may be smaller. By tokens: as few parts as the budget
    allows, of nearly equal numbers of tokens, each with ascending row numbers. Rows that share a prompt stay together,
    unless they exceed the budget by themselves, and count it once, as packing does. With rows_together, so many neighbours
    (the two sides of a pair) are one unit, which no cut divides.

    Raises: RequestError when a single row, or unit, is longer than ``max_tokens``.
    """
    if max_tokens is None:
        assert sequences is not None, "neither sequences nor max_tokens is given"
        rows = list(range(len(batch)))
        sequences = max(sequences // rows_together, 1) * rows_together
        return [rows[start : start + sequences] for start in range(0, len(rows), sequences)]
    if rows_together > 1:
        return _whole_units(batch, max_tokens, rows_together, share_prompts=share_prompts)
    prompts, responses = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    longest = max(map(sum, zip(prompts, responses, strict=True)), default=0)
    if longest > max_tokens:
        what = f"a prompt and response of {longest} tokens do not fit into a micro-batch of {max_tokens} tokens"
        raise RequestError(Problem(what, fix=f"allow at least {longest} tokens per micro-batch"))
    pieces: list[list[int]] = []  # rows that stay together
    for run in rows_sharing_a_prompt(batch) if share_prompts else ([row] for row in range(len(batch))):
        if len(run) == 1:
            pieces.append(run)
        else:
            parts = token_budget_parts([responses[row] for row in run], max_tokens - prompts[run[0]])
            pieces += [[run[item] for item in part] for part in parts]
    loads = [prompts[piece[0]] + sum(responses[row] for row in piece) for piece in pieces]
    return [
        sorted(chain.from_iterable(pieces[item] for item in part)) for part in token_budget_parts(loads, max_tokens)
    ]


def _whole_units(batch: SequenceBatch, max_tokens: int, rows_together: int, *, share_prompts: bool) -> list[list[int]]:
    """Split by tokens between units of so many neighbouring rows."""
    units = [list(range(start, start + rows_together)) for start in range(0, len(batch), rows_together)]
    loads = [tokens_of(batch.rows(unit), share_prompts=share_prompts) for unit in units]
    if max(loads) > max_tokens:
        what = (
            f"a pair of sequences has {max(loads)} tokens, which do not fit into a micro-batch of {max_tokens} tokens"
        )
        raise RequestError(Problem(what, fix=f"allow at least {max(loads)} tokens per micro-batch"))
    parts = token_budget_parts(loads, max_tokens)
    return [sorted(chain.from_iterable(units[item] for item in part)) for part in parts]


def tokens_of(batch: SequenceBatch, *, share_prompts: bool = True) -> int:
    """Count the tokens that the model reads when these rows are packed together."""
    responses = int(batch.response_lengths.sum())
    if not share_prompts:
        return responses + int(batch.prompt_lengths.sum())
    prompts = batch.prompt_lengths.tolist()
    return responses + sum(prompts[run[0]] for run in rows_sharing_a_prompt(batch))


def in_row_order(parts: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """Concatenate parts, [b, T] each, and restore the batch's order of rows, [B, T]."""
    return torch.cat(list(parts))[torch.tensor(list(chain.from_iterable(rows))).argsort()]
