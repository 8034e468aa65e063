"""Texts for supervised fine-tuning as a training batch: the unlearned beginning is the prompt, the rest the response."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.records.batches import SequenceBatch, TrainBatch, TrainerLogprobs
from posttrain.records.texts import Text


def text_batch(texts: Sequence[Text], *, per_group: int = 1) -> TrainBatch:
    """Build a batch, rows in order. The response begins at a text's first learned token; later unlearned tokens (user messages
    in between) are masked inside it; tokens after the last learned one change no loss and are left out.

    Rewards, advantages and the sampler's log-probs are 0: no supervised loss reads them. So many neighbours are one group, whose
    prompt is computed once where they share it; by default every row is its own.
    """
    starts = [int(text.learned.argmax()) for text in texts]
    ends = [len(text.learned) - int(text.learned[::-1].argmax()) for text in texts]
    width = max(starts)
    length = max(end - start for start, end in zip(starts, ends, strict=True))
    tokens = torch.zeros(len(texts), width + length, dtype=torch.int64)
    mask = torch.zeros(len(texts), length, dtype=torch.bool)
    for row, (text, start, end) in enumerate(zip(texts, starts, ends, strict=True)):
        ids = torch.from_numpy(text.token_ids[:end].astype("int64"))
        tokens[row, width - start : width + end - start] = ids
        mask[row, : end - start] = torch.from_numpy(text.learned[start:end].copy())
    nothing = torch.zeros(mask.shape)
    sequences = SequenceBatch(
        tokens=tokens,
        prompt_lengths=torch.tensor(starts),
        response_mask=mask,
        rollout_logprobs=nothing,
        group_index=torch.arange(len(texts)) // per_group,
        trajectory_index=torch.arange(len(texts)),
        sample_ids=tuple(text.name for text in texts),
        images=tuple(text.images for text in texts) if any(text.images for text in texts) else (),
    )
    return TrainBatch(
        sequences=sequences,
        scores=torch.zeros(len(texts)),
        logprobs=TrainerLogprobs(),
        advantages=nothing,
        loss_mask=mask,
    )
