"""The loss of a model on texts that it does not learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.data.text_batches import text_batch
from posttrain.interfaces.train_engine import ScoringEngine
from posttrain.records.texts import Text

ROWS_AT_ONCE = 64  # handed to the engine together, which cuts its own micro-batches


def mean_loss(model: ScoringEngine, texts: Sequence[Text], on_texts: Callable[[int], None] | None = None) -> float:
    """The mean of -log pi over all learned tokens of all texts, nats. ``on_texts`` is called with the number of texts done."""
    total, tokens = 0.0, 0
    for start in range(0, len(texts), ROWS_AT_ONCE):
        batch = text_batch(texts[start : start + ROWS_AT_ONCE])
        logprobs = model.logprobs(batch.sequences, 1.0)
        total -= float(logprobs[batch.loss_mask].double().sum())
        tokens += int(batch.loss_mask.sum())
        if on_texts:
            on_texts(len(batch))
    return total / tokens
