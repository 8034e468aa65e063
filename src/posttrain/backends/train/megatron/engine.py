"""The policy on megatron-core: scored and updated over tensor-, pipeline- and context-parallel ranks.

Losses, counts, micro-batches and checkpoints are those of every engine; megatron-core runs the layers and the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.algos.objective import policy_objective
from posttrain.algos.preferences import preference_loss
from posttrain.backends.torch_training.memory import Cutter
from posttrain.backends.torch_training.optimized_model import Factor, How, MicroBatch
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.train.megatron.learner import MegatronLearner
from posttrain.backends.train.megatron.scorer import (
    MegatronScorer,
    WithoutAdapter,
    divergence_from,
    frozen,
    policy_scores,
)
from posttrain.backends.train.megatron.sharding import MegatronSharding
from posttrain.config import TrainingConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.models.lora import is_adapted
from posttrain.models.routing import Routers
from posttrain.records.batches import LossCounts, SequenceBatch, TeacherScores, TrainBatch
from posttrain.records.plans import DistillationPlan, LossPlan, PreferencePlan
from posttrain.records.span_tensors import row_counts
from posttrain.records.statistics import ForwardBackwardStats
from posttrain.registry import TRAIN_ENGINES


@TRAIN_ENGINES.register("megatron")
class MegatronTrainEngine(MegatronLearner):
    """See interfaces.train_engine.TrainEngine. Requires ``sharding=megatron.sharding.MegatronSharding(...)``."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        optimizer: OptimizerConfig,
        learning_rate_factor: Factor,
        sequences_per_micro_batch: int | None,
        sequences_per_scoring_batch: int,
        max_tokens_per_micro_batch: int | None = None,
        max_tokens_per_scoring_batch: int | None = None,
        reference: MegatronScorer | None = None,
        routers: Routers | None = None,  # of the shell; those of megatron-core replay and balance experts
        **how: Unpack[How],
    ):
        assert reference is None, "checks reject losses that need the reference"
        super().__init__(
            model,
            tokenizer,
            optimizer=optimizer,
            learning_rate_factor=learning_rate_factor,
            sequences_per_micro_batch=sequences_per_micro_batch,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            how=how,
            replays_experts=routers is not None,
        )
        scoring = Cutter(
            sequences_per_scoring_batch,
            self._sharding.pooled(max_tokens_per_scoring_batch),
            share_prompts=self._share_prompts,
        )
        self._scorer = MegatronScorer(self.parts, scoring, padded=self.padded, choice=self._pipeline.choice)
        self._sharding.policy = self.parts

    @staticmethod
    def sharding_of(
        config: TrainingConfig, role: str, device: torch.device, compute_dtype: torch.dtype
    ) -> MegatronSharding:
        return MegatronSharding.of_run(config, role, device, compute_dtype)

    @staticmethod
    def scorer(
        model: PreTrainedModel,
        sequences_per_micro_batch: int,
        share_prompts: bool = True,
        max_tokens_per_micro_batch: int | None = None,
        *,
        padded: bool = False,
        weights: Callable[[], AbstractContextManager[Any]] = nullcontext,
        sharding: Sharding | None = None,
        **unused: Any,  # for engines of one process
    ) -> MegatronScorer | WithoutAdapter:
        """Build a scorer of a separate frozen model, sharded like the policy, or of the policy without its adapter."""
        assert isinstance(sharding, MegatronSharding)
        cutter = Cutter(
            sequences_per_micro_batch,
            sharding.pooled(max_tokens_per_micro_batch),
            share_prompts=share_prompts and not padded,
            what="a scoring batch",
        )
        if is_adapted(model):
            return WithoutAdapter(cutter, sharding, weights, padded=padded)
        return frozen(model, cutter, sharding, padded=padded)

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scorer.logprobs(batch, temperature)

    def logprobs_and_experts(self, batch: SequenceBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return self._scorer.logprobs_and_experts(batch, temperature)

    def entropies(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scorer.entropies(batch, temperature)

    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scorer.sum_pi_squared(batch, temperature)

    def divergence(self, batch: SequenceBatch, teachers: Mapping[str, TeacherScores], plan: DistillationPlan) -> Tensor:
        return self._scorer.divergence(batch, teachers, plan)

    def forward_backward(
        self, batch: TrainBatch, loss: LossPlan | PreferencePlan, counts: LossCounts
    ) -> ForwardBackwardStats:
        def learn(
            micro: TrainBatch,
            logprobs: Tensor,
            entropies: Tensor,
            pi_squared: Tensor,
            divergence: Tensor | None = None,
        ) -> MicroBatch:
            if isinstance(loss, PreferencePlan):
                compared = preference_loss(logprobs, micro, loss, counts)
                return MicroBatch(loss=compared, sums={}, values=logprobs.detach())
            micro_loss, sums = policy_objective(logprobs, entropies, micro, loss, counts, None, divergence)
            return MicroBatch(loss=micro_loss, sums=sums, values=logprobs.detach())

        compare = None
        if isinstance(loss, PreferencePlan):
            self.cutter.rows_together = loss.rows_per_unit
            scores = policy_scores(self.parts, 1.0, entropy_gradient=False)
        else:
            scores = policy_scores(self.parts, loss.temperature, entropy_gradient=loss.entropy_coef > 0)
            if loss.distillation and loss.distillation.in_forward_pass:
                compare = divergence_from(self.parts, loss.distillation)
        balance = 0.0 if isinstance(loss, PreferencePlan) else loss.router_balance_coef
        total, sums, logprobs = self.accumulate(batch, scores, learn, counts, balance, compare=compare)
        return ForwardBackwardStats(
            loss=total, sums=sums, tokens=int(row_counts(batch.loss_mask).sum()), policy_logprobs=logprobs
        )
