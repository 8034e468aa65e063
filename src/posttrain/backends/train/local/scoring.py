"""Log-probs of response tokens from a Hugging Face model, packed, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.algos.logprobs import log_probabilities, token_logprobs
from posttrain.data.packing import PackedSequences, pack
from posttrain.models.packed_attention import shared_layout
from posttrain.records.batches import SequenceBatch


def response_logits(model: PreTrainedModel, packed: PackedSequences) -> Tensor:
    """Logits that predict the scored tokens, [M, vocabulary]: the head runs on those positions only."""
    output = model(
        input_ids=packed.token_ids[None],
        position_ids=packed.position_ids[None],
        attention_layout=shared_layout(packed.groups, packed.token_ids.device),
        logits_to_keep=packed.predicting,
        use_cache=False,
    )
    return output.logits[0]


class Scorer:
    """A frozen model that scores responses (the reference, or a policy between updates)."""

    def __init__(self, model: PreTrainedModel, sequences_per_micro_batch: int, share_prompts: bool = True):
        self.model = model
        self.share_prompts = share_prompts
        self.sequences_per_micro_batch = sequences_per_micro_batch

    @torch.no_grad()
    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """See interfaces.train_engine.ScoringEngine."""
        parts = []
        for rows in micro_batches(len(batch), self.sequences_per_micro_batch):
            packed = pack(batch.rows(rows), self.model.device, share_prompts=self.share_prompts)
            scores = log_probabilities(response_logits(self.model, packed), temperature)
            parts.append(packed.unpack(token_logprobs(scores, packed.targets)).cpu())
        return torch.cat(parts)


def micro_batches(rows: int, size: int) -> Iterator[list[int]]:
    """Row numbers 0 to rows - 1, in order, ``size`` at a time; the last part may be smaller."""
    for start in range(0, rows, size):
        yield list(range(start, min(start + size, rows)))
