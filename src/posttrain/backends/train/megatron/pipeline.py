"""Rows of a batch through megatron's layers and pipeline, in micro-batches, to scores of response tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from posttrain.backends.torch_training.memory import Cutter, is_out_of_memory
from posttrain.backends.torch_training.sharding import Row
from posttrain.backends.train.megatron.expert_choice import ExpertChoice, Passing
from posttrain.backends.train.megatron.model import run
from posttrain.backends.train.megatron.parts import ModelParts
from posttrain.backends.train.megatron.sharding import MegatronSharding
from posttrain.backends.train.megatron.without_cuda import on_this_machine
from posttrain.data.packing import PackedSequences, pack, unpack_tokens
from posttrain.errors import RunStopped
from posttrain.records.batches import SequenceBatch, TeacherScores

# Scores at a row's scored positions, each [N], from the last hidden states of this rank's tokens, [n, H].
Scores = Callable[[Tensor, Row], Sequence[Tensor]]
# Further scores of micro-batch number i, which read more than its row.
Beside = Callable[[int, PackedSequences, Tensor, Row], Tensor]
# The comparison of a micro-batch with the answers of its teachers, [m] nats
Compare = Callable[[Mapping[str, TeacherScores], PackedSequences, Tensor, Row], Tensor]
# Scores of micro-batch number i, each [b, T] on the CPU -> (its loss, the value to keep).
Finish = Callable[[int, Sequence[Tensor]], tuple[Tensor, Any]]


class Pipeline:
    """A model's parts, and the splitting of batches for them."""

    def __init__(self, parts: ModelParts, cutter: Cutter, *, padded: bool = False):
        self.parts = parts
        self.choice: ExpertChoice | None = None  # of experts, which passes replay where the batch has any
        self.cutter = cutter
        self.padded = padded
        self.sharding: MegatronSharding = parts.sharding

    def over(self, batch: SequenceBatch, scores: Scores, *, each: tuple[int, ...] = ()) -> Tensor:
        """Compute the first of the scores for all rows, [B, T] on the CPU, or [B, T, *each] of scores with more dimensions; no
        gradient."""
        rows = self.dealt(batch)
        found = self.through(
            [batch.rows(part or [0]) for part in rows], scores, lambda number, found: (found[0].sum(), found[0])
        )
        return self._joined(batch, rows, found, each)

    def beside(self, batch: SequenceBatch, of: Callable[[list[int], PackedSequences, Tensor, Row], Tensor]) -> Tensor:
        """Compute a score that reads the row numbers of its micro-batch, for all rows, [B, T] on the CPU; no gradient."""
        rows = self.dealt(batch)
        found = self.through(
            [batch.rows(part or [0]) for part in rows],
            lambda hidden, row: (),
            lambda number, found: (found[0].sum(), found[0]),
            beside=lambda number, packed, hidden, row: of(rows[number] or [0], packed, hidden, row),
        )
        return self._joined(batch, rows, found, ())

    def _joined(
        self, batch: SequenceBatch, rows: Sequence[list[int]], found: Sequence[Tensor], each: tuple[int, ...]
    ) -> Tensor:
        known = [values for part, values in zip(rows, found, strict=False) if part]
        empty = torch.zeros(0, *batch.response_mask.shape[1:], *each)
        order = [row for part in rows for row in part] if known else []
        return self.sharding.joined(torch.cat([empty, *known]), order, len(batch))

    def dealt(self, batch: SequenceBatch) -> list[list[int]]:
        """Return the row numbers of this copy's micro-batches; an empty one is run with weight 0."""
        whole = self.cutter.cut(batch)
        return self.sharding.deal(whole, [self.cutter.tokens(batch, rows) for rows in whole])

    def through(
        self,
        micros: Sequence[SequenceBatch],
        scores: Scores,
        finish: Finish,
        *,
        backward: bool = False,
        learned: Sequence[Tensor] | None = None,
        beside: Beside | None = None,
    ) -> list[Any]:
        """Run the micro-batches through the pipeline, and backward if requested. ``beside`` gives one more score, the last.

        Args: learned [b] bool of each micro-batch, the rows at whose responses losses of routers look.
        Returns: the values kept by ``finish``, on the last stage; elsewhere nothing.
        Raises: RunStopped when a micro-batch does not fit into memory.
        """

        def step(numbers: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
            number = next(numbers)
            packed = pack(
                micros[number], self.sharding.device, share_prompts=self.cutter.share_prompts, padded=self.padded
            )
            row = self.sharding.row(packed, None if learned is None else packed.of_responses(learned[number]))
            if self.choice:
                self.choice.prepare(number, Passing(row.experts, row.counted), learns=backward)

            def last(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
                found = [*scores(hidden[0], row), *([beside(number, packed, hidden[0], row)] if beside else [])]
                loss, kept = finish(number, [self._unpacked(each, row, packed) for each in found])
                return loss, torch.tensor(1, dtype=torch.int32, device=self.sharding.device), kept

            return run(model, row), last

        stretches = self.parts.stretches
        virtual = len(stretches) if len(stretches) > 1 else None
        numbers = [iter(range(len(micros))) for _ in stretches]
        try:
            with on_this_machine(), nullcontext() if backward else torch.no_grad():
                found: list[Any] = get_forward_backward_func(self.sharding.pipeline, virtual)(
                    forward_step_func=step,
                    data_iterator=numbers if virtual else numbers[0],
                    model=stretches if virtual else stretches[0],
                    num_microbatches=len(micros),
                    seq_length=1,  # shapes are exchanged before every tensor, since row lengths differ
                    micro_batch_size=1,
                    forward_only=not backward,
                )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise RunStopped("out of memory in a micro-batch of megatron; use smaller micro-batches") from error
        finally:
            if self.choice:
                self.choice.clear()
        return found

    def unpacked_tokens(self, values: Tensor, micro: SequenceBatch) -> Tensor:
        """Scatter values of a micro-batch's tokens, [n, ...], to [b, P + T, ...], -1 where a row has no token."""
        return unpack_tokens(values, micro, share_prompts=self.cutter.share_prompts, padded=self.padded)

    def _unpacked(self, values: Tensor, row: Row, packed: PackedSequences) -> Tensor:
        whole = self.sharding.collected(values, row, packed)
        return (packed.unpack(whole) if whole.ndim == 1 else packed.unpack_several(whole)).cpu()
