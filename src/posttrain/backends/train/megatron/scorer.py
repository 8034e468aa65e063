"""Rows of a batch through megatron's layers and pipeline, micro-batch by micro-batch, to the scores of response tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.algos.fused_scoring import TokenScores
from posttrain.backends.torch_training.memory import Cutter, is_out_of_memory
from posttrain.backends.torch_training.sharding import Row
from posttrain.backends.train.megatron.model import run
from posttrain.backends.train.megatron.parts import ModelParts
from posttrain.backends.train.megatron.scoring import score_cut
from posttrain.backends.train.megatron.sharding import MegatronSharding
from posttrain.backends.train.megatron.without_cuda import on_this_machine
from posttrain.data.packing import PackedSequences, pack
from posttrain.errors import RunStopped
from posttrain.models.head import states_at
from posttrain.records.batches import SequenceBatch


class Way(NamedTuple):
    """How a micro-batch is scored."""

    temperature: float
    entropy_gradient: bool = False
    backward: bool = False


# The scores of micro-batch number i, each [b, T]: (i, log-probs, entropies, sums of squares) -> (its loss, what is kept of it).
Finish = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Any]]


class MegatronScorer:
    """See interfaces.train_engine.ScoringEngine. A frozen model (the reference), or the policy between updates."""

    note: str | None = None

    def __init__(self, parts: ModelParts, cutter: Cutter, *, padded: bool = False):
        self.parts = parts
        self.cutter = cutter
        self.padded = padded
        self.sharding: MegatronSharding = parts.sharding

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._over_batch(batch, temperature, lambda logprobs, pi_squared: logprobs)

    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._over_batch(batch, temperature, lambda logprobs, pi_squared: pi_squared)

    def _over_batch(
        self, batch: SequenceBatch, temperature: float, chosen: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        def finish(number: int, logprobs: Tensor, entropies: Tensor, pi_squared: Tensor) -> tuple[Tensor, Any]:
            return logprobs.sum(), chosen(logprobs, pi_squared)

        rows = self.dealt(batch, self.cutter)
        found = self.through([batch.rows(part or [0]) for part in rows], Way(temperature), finish)
        known = [scores for part, scores in zip(rows, found, strict=False) if part]
        empty = torch.zeros(0, *batch.response_mask.shape[1:])
        order = [row for part in rows for row in part] if known else []
        return self.sharding.joined(torch.cat([empty, *known]), order, len(batch))

    def dealt(self, batch: SequenceBatch, cutter: Cutter) -> list[list[int]]:
        """Row numbers of this copy's micro-batches; an empty one is run and counts nothing."""
        whole = cutter.cut(batch)
        return self.sharding.deal(whole, [cutter.tokens(batch, rows) for rows in whole])

    def through(self, micros: Sequence[SequenceBatch], way: Way, finish: Finish) -> list[Any]:
        """Run the micro-batches through the pipeline, and backward if asked for.

        Returns: what ``finish`` keeps of each, on the last stage; elsewhere nothing.
        Raises: RunStopped when a micro-batch does not fit into memory.
        """

        def step(numbers: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
            number = next(numbers)
            packed = pack(
                micros[number], self.sharding.device, share_prompts=self.cutter.share_prompts, padded=self.padded
            )
            row = self.sharding.row(packed)

            def last(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
                scores = self._scores(hidden[0], row, packed, way)
                loss, kept = finish(number, *scores)
                return loss, torch.tensor(1, dtype=torch.int32, device=self.sharding.device), kept

            return run(model, row), last

        try:
            with on_this_machine(), nullcontext() if way.backward else torch.no_grad():
                found: list[Any] = get_forward_backward_func()(
                    forward_step_func=step,
                    data_iterator=iter(range(len(micros))),
                    model=self.parts.gpt,
                    num_microbatches=len(micros),
                    seq_length=1,  # shapes are exchanged before every tensor: no two rows are equally long
                    micro_batch_size=1,
                    forward_only=not way.backward,
                )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise RunStopped("out of memory in a micro-batch of megatron; use smaller micro-batches") from error
        return found

    def _scores(self, hidden: Tensor, row: Row, packed: PackedSequences, way: Way) -> tuple[Tensor, Tensor, Tensor]:
        """[b, T] log-probs, entropies and sums of squared probabilities on the CPU, from hidden states [n, H]."""
        if self.sharding.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        scores: TokenScores = score_cut(
            states_at(hidden, row.predicting),
            self.parts.head,
            row.targets,
            vocabulary=self.parts.vocabulary,
            group=self.sharding.tensor_group,
            temperature=way.temperature,
            entropy_gradient=way.entropy_gradient,
        )
        assert scores.sum_pi_squared is not None
        found = [
            packed.unpack(self.sharding.collected(each, row, packed)).cpu()
            for each in (scores.logprobs, scores.entropy, scores.sum_pi_squared)
        ]
        return found[0], found[1], found[2]


def frozen(
    model: PreTrainedModel, cutter: Cutter, sharding: MegatronSharding, *, padded: bool = False
) -> MegatronScorer:
    """A model that is only scored."""
    parts = ModelParts(model, sharding)
    parts.gpt.requires_grad_(False)
    parts.release()
    return MegatronScorer(parts, cutter, padded=padded)
