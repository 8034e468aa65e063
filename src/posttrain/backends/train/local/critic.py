"""One device: the critic, a model with a value head and AdamW in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.algos.aggregation import aggregate
from posttrain.algos.value_loss import value_loss
from posttrain.backends.train.local.optimized_model import OptimizedModel
from posttrain.config.policy import OptimizerConfig
from posttrain.data.micro_batches import in_row_order, micro_batches
from posttrain.data.packing import pack
from posttrain.models.packed_attention import shared_layout
from posttrain.models.value_head import token_values
from posttrain.records.batches import LossCounts, SequenceBatch, TrainBatch
from posttrain.records.plans import ValueLossPlan
from posttrain.records.statistics import LossStats
from posttrain.registry import VALUE_ENGINES


@VALUE_ENGINES.register("local")
class LocalValueEngine(OptimizedModel):
    """See interfaces.train_engine.ValueEngine. The model is one of models.value_head, and stays in eval mode: no dropout."""

    path_field = "critic.path"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        optimizer: OptimizerConfig,
        learning_rate_factor: Callable[[int], float],  # update number -> factor of the peak
        sequences_per_micro_batch: int | None,
        max_tokens_per_micro_batch: int | None = None,  # instead of the number of sequences
        gradient_checkpointing: bool = False,
        share_prompts: bool = True,
    ):
        super().__init__(
            model,
            tokenizer,
            optimizer=optimizer,
            learning_rate_factor=learning_rate_factor,
            gradient_checkpointing=gradient_checkpointing,
        )
        self.sequences_per_micro_batch = sequences_per_micro_batch
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.share_prompts = share_prompts

    @torch.no_grad()
    def values(self, batch: SequenceBatch) -> Tensor:
        cut = self._micro_batches(batch)
        return in_row_order([self._values(batch.rows(rows)) for rows in cut], cut)

    def forward_backward(self, batch: TrainBatch, loss: ValueLossPlan, counts: LossCounts) -> LossStats:
        total, sums = 0.0, Counter[str]()
        self.recompute_activations(True)
        for rows in self._micro_batches(batch.sequences):
            micro = batch.rows(rows)
            old_values, returns, mask = micro.sequences.values, micro.returns, micro.loss_mask
            assert old_values is not None and returns is not None, "a critic's batch has values and returns"
            values = self._values(micro.sequences)
            token_loss, report = value_loss(values, old_values, returns, mask, value_clip=loss.value_clip)
            micro_loss = aggregate(
                token_loss,
                mask,
                loss.aggregation,
                counts,
                norm_tokens=loss.norm_tokens,
                group_index=micro.sequences.group_index,
            )
            micro_loss.backward()
            total += micro_loss.item()
            sums.update({f"critic/{name}": float(torch.where(mask, v, 0.0).sum()) for name, v in report.items()})
        self.recompute_activations(False)
        return LossStats(loss=total, sums=dict(sums), tokens=int(batch.loss_mask.sum()))

    def _micro_batches(self, batch: SequenceBatch) -> list[list[int]]:
        return micro_batches(
            batch, self.sequences_per_micro_batch, self.max_tokens_per_micro_batch, share_prompts=self.share_prompts
        )

    def _values(self, batch: SequenceBatch) -> Tensor:
        """[B, T] on the CPU, carrying gradient where that is on."""
        packed = pack(batch, self.model.device, share_prompts=self.share_prompts)
        values = token_values(
            self.model,
            packed.predicting,
            input_ids=packed.token_ids[None],
            position_ids=packed.position_ids[None],
            attention_layout=shared_layout(packed.groups, packed.token_ids.device),
            use_cache=False,
        )
        return packed.unpack(values).cpu()
