"""The critic: a model with a value head that is evaluated and updated."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.objective import aggregate
from posttrain.algos.preferences import preference_loss
from posttrain.algos.value_loss import value_loss
from posttrain.backends.torch_training.optimized_model import MicroBatch, OptimizedModel
from posttrain.backends.torch_training.scoring import over_rows
from posttrain.data.packing import pack
from posttrain.models.value_head import head_name, token_values
from posttrain.records.batches import LossCounts, SequenceBatch, TrainBatch
from posttrain.records.plans import PreferencePlan, ValueLossPlan
from posttrain.records.span_tensors import row_counts
from posttrain.records.statistics import ValueStats


class ValueModel(OptimizedModel):
    """See interfaces.train_engine.ValueEngine. The model is one of models.value_head."""

    path_field = "critic.path"

    @torch.no_grad()
    def values(self, batch: SequenceBatch) -> Tensor:
        return over_rows(batch, self.cutter, self._sharding, lambda rows: self._values(batch.rows(rows)))

    def forward_backward(
        self, batch: TrainBatch, loss: ValueLossPlan | PreferencePlan, counts: LossCounts
    ) -> ValueStats:
        def learn(micro: TrainBatch) -> MicroBatch:
            values = self._values(micro.sequences)
            if isinstance(loss, PreferencePlan):
                scores = values.detach()
                return MicroBatch(loss=preference_loss(values, micro, loss, counts), sums={}, values=scores)
            return learn_values(micro, values, loss, counts)

        self.cutter.rows_together = loss.rows_per_unit if isinstance(loss, PreferencePlan) else 1
        total, sums, values = self.accumulate(batch, learn)
        return ValueStats(loss=total, sums=sums, tokens=int(row_counts(batch.loss_mask).sum()), values=values)

    def _head(self) -> str | None:
        return head_name(self.model)

    def _values(self, batch: SequenceBatch) -> Tensor:
        """Compute values, [B, T] on the CPU, carrying gradient where it is enabled."""
        packed = pack(batch, self.device, share_prompts=self.cutter.share_prompts, padded=self.padded)
        row = self._sharding.row(packed)
        values = self._sharding.forward(
            self.model,
            lambda: token_values(
                self.model,
                row.predicting,
                **row.inputs(self.model),
                attention_layout=row.layout,
                use_cache=False,
            ),
        )
        return packed.unpack(self._sharding.collected(values, row, packed)).cpu()


def learn_values(micro: TrainBatch, values: Tensor, loss: ValueLossPlan, counts: LossCounts) -> MicroBatch:
    """Compute a micro-batch's part of the value loss, from its values [b, T] on the CPU, which carry gradient."""
    targets, mask = micro.critic, micro.loss_mask
    assert targets is not None, "a critic's batch has values and returns"
    token_loss, report = value_loss(values, targets.values, targets.returns, mask, value_clip=loss.value_clip)
    micro_loss = aggregate(
        token_loss,
        mask,
        loss.aggregation,
        counts,
        norm_tokens=loss.norm_tokens,
        group_index=micro.sequences.group_index,
    )
    sums = {f"critic/{name}": float(torch.where(mask, v, 0.0).sum()) for name, v in report.items()}
    return MicroBatch(loss=micro_loss, sums=sums, values=values.detach())
