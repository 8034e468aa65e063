"""The arithmetic of an update, and the peak speed of the device."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.records.batches import SequenceBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The arithmetic of a policy all of whose weights are trained, on one device."""

    layer_parameters: int  # in the matrices that every token goes through: all but embedding and head
    head_parameters: int  # in the language-model head, which response tokens go through
    flops_per_s: float  # of a large matrix product in the compute precision, measured on this device
    shares_prompts: bool  # a group's prompt goes through the model once

    def update_flops(self, batch: SequenceBatch) -> float:
        """Floating-point operations of one pass, forward and backward, over a batch: 6 per token and parameter (2 forward, 4
        backward). The products within attention, which are few at some hundred tokens, are not counted, and no recomputed
        activations are.

        Source: J. Kaplan et al., arXiv:2001.08361, section 2.1 (C = 6 N D).
        """
        responses = int(batch.response_lengths.sum())
        prompts = batch.prompt_lengths
        if self.shares_prompts:
            first = {group: row for row, group in reversed(list(enumerate(batch.group_index.tolist())))}
            prompts = prompts[list(first.values())]
        return 6.0 * (self.layer_parameters * (int(prompts.sum()) + responses) + self.head_parameters * responses)
