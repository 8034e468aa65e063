"""The critic on megatron-core. Its value head is replicated on the tensor-parallel ranks of the last stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.torch_training.critic import learn_values
from posttrain.backends.torch_training.optimized_model import Factor, How, MicroBatch
from posttrain.backends.torch_training.sharding import Row
from posttrain.backends.train.megatron.learner import MegatronLearner
from posttrain.config.policy import OptimizerConfig
from posttrain.models.head import states_at
from posttrain.records.batches import LossCounts, SequenceBatch, TrainBatch
from posttrain.records.plans import ValueLossPlan
from posttrain.records.span_tensors import row_counts
from posttrain.records.statistics import LossStats
from posttrain.registry import VALUE_ENGINES


@VALUE_ENGINES.register("megatron")
class MegatronValueEngine(MegatronLearner):
    """See interfaces.train_engine.ValueEngine. The model is one of models.value_head; requires
    ``sharding=megatron.sharding.MegatronSharding(...)``."""

    role = "critic"
    path_field = "critic.path"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        optimizer: OptimizerConfig,
        learning_rate_factor: Factor,
        sequences_per_micro_batch: int | None,
        max_tokens_per_micro_batch: int | None = None,
        **how: Unpack[How],
    ):
        super().__init__(
            model,
            tokenizer,
            optimizer=optimizer,
            learning_rate_factor=learning_rate_factor,
            sequences_per_micro_batch=sequences_per_micro_batch,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            how=how,
        )

    def values(self, batch: SequenceBatch) -> Tensor:
        return self._pipeline.over(batch, self._values)

    def forward_backward(self, batch: TrainBatch, loss: ValueLossPlan, counts: LossCounts) -> LossStats:
        def learn(micro: TrainBatch, values: Tensor) -> MicroBatch:
            return learn_values(micro, values, loss, counts)

        total, sums, _ = self.accumulate(batch, self._values, learn, counts)
        return LossStats(loss=total, sums=sums, tokens=int(row_counts(batch.loss_mask).sum()))

    def _values(self, hidden: Tensor, row: Row) -> Sequence[Tensor]:
        if self._sharding.sequence_parallel:
            # Every rank computes all values from all tokens, so the gradient of its own tokens is complete.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        head = self.parts.stretches[-1].output_layer
        return (linear(states_at(hidden, row.predicting).float(), head.weight, head.bias)[:, 0],)
