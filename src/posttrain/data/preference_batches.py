"""Rows of a preference dataset as training batches: the sides of a pair are neighbours and share their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from posttrain.data.text_batches import text_batch
from posttrain.records.batches import PreferenceTargets, TrainBatch
from posttrain.records.preferences import Preference
from posttrain.records.texts import Text


def preference_batch(rows: Sequence[Preference], *, scored: bool = False) -> TrainBatch:
    """Build a batch of all sides of all rows, in order. The reference's log-probs are those of the rows, 0 where they have none.

    With ``scored`` the only loss token of a side is one after its last: a score head's number there depends on the whole
    text (interfaces.train_engine.ValueEngine). The token is a placeholder that nothing attends to.
    """
    sides = [(row, text) for row in rows for text in row.sides]
    batch = text_batch([text for _, text in sides], per_group=len(rows[0].sides))
    if scored:
        batch = _behind_the_end(batch)
    known = [value for row in rows for value in row.ref_logps or (0.0,) * len(row.sides)]
    targets = PreferenceTargets(
        ref_logps=torch.tensor(known, dtype=torch.float64),
        desirable=torch.tensor([row.desirable for row, _ in sides]),
        margins=torch.tensor([row.margin for row, _ in sides], dtype=torch.float32),
    )
    return replace(batch, preference=targets)


def _behind_the_end(batch: TrainBatch) -> TrainBatch:
    """Add a column, and move the mask of every row to the token after its last learned one."""
    sequences = batch.sequences
    ends = sequences.response_lengths
    mask = torch.zeros(len(batch), sequences.response_mask.shape[1] + 1, dtype=torch.bool)
    mask[torch.arange(len(batch)), ends] = True
    nothing = torch.zeros(mask.shape)
    moved = replace(sequences, tokens=pad(sequences.tokens, (0, 1)), response_mask=mask, rollout_logprobs=nothing)
    return replace(batch, sequences=moved, loss_mask=mask, advantages=nothing)


def mismatched(rows: Sequence[Preference], max_tokens: int) -> list[Preference]:
    """Give every row the completion of the next one, the last that of the first: texts on which KTO estimates the KL. Cut to
    max_tokens, of which a prompt leaves at least one for the completion."""
    texts = [row.sides[0] for row in rows]
    starts = [int(text.learned.argmax()) for text in texts]
    found = []
    for index, row in enumerate(rows):
        other = (index + 1) % len(rows)
        prompt, completion = texts[index], texts[other]
        ids = np.concatenate([prompt.token_ids[: starts[index]], completion.token_ids[starts[other] :]])
        learned = np.concatenate([np.zeros(starts[index], np.bool_), completion.learned[starts[other] :]])
        text = Text(name=row.name, token_ids=ids[:max_tokens], learned=learned[:max_tokens], images=prompt.images)
        found.append(Preference(name=row.name, sides=(text,), desirable=row.desirable))
    return found


def with_ref_logps(batch: TrainBatch, ref_logps: Tensor) -> TrainBatch:
    """The batch with the reference's log-probs [B] of whole completions."""
    assert batch.preference is not None, "rows of a preference dataset carry their targets"
    return replace(batch, preference=replace(batch.preference, ref_logps=ref_logps))
