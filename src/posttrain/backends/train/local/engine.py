"""One device: a Hugging Face model and AdamW in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.algos.objective import policy_objective
from posttrain.backends.train.local.optimized_model import OptimizedModel
from posttrain.backends.train.local.scoring import Scorer
from posttrain.config.policy import OptimizerConfig
from posttrain.data.micro_batches import in_row_order, micro_batches
from posttrain.data.packing import pack
from posttrain.errors import ModelError, Problem
from posttrain.records.batches import LossCounts, SequenceBatch, TrainBatch
from posttrain.records.plans import LossPlan
from posttrain.records.statistics import ForwardBackwardStats
from posttrain.registry import TRAIN_ENGINES


@TRAIN_ENGINES.register("local")
class LocalTrainEngine(OptimizedModel):
    """See interfaces.train_engine.TrainEngine. The model stays in eval mode: dropout would make the trainer score another
    policy than the one that sampled."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        optimizer: OptimizerConfig,
        learning_rate_factor: Callable[[int], float],  # update number -> factor of the peak
        sequences_per_micro_batch: int | None,
        sequences_per_scoring_batch: int,
        max_tokens_per_micro_batch: int | None = None,  # instead of the number of sequences
        max_tokens_per_scoring_batch: int | None = None,
        reference: Scorer | None = None,  # for the KL over the whole vocabulary (kl_estimator full) in the loss
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
        self._scorer = Scorer(
            model,
            sequences_per_scoring_batch,
            share_prompts,
            max_tokens_per_micro_batch=max_tokens_per_scoring_batch,
        )
        self._reference = reference
        if reference:
            _check_same_vocabulary(model, reference.model)

    @staticmethod
    def scorer(
        model: PreTrainedModel,
        sequences_per_micro_batch: int,
        share_prompts: bool = True,
        max_tokens_per_micro_batch: int | None = None,
    ) -> Scorer:
        """A frozen model beside this engine (the reference)."""
        return Scorer(
            model, sequences_per_micro_batch, share_prompts, max_tokens_per_micro_batch=max_tokens_per_micro_batch
        )

    @property
    def note(self) -> str | None:
        """Something the user should know about how this model is computed; None when there is nothing."""
        return self._scorer.note

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scorer.logprobs(batch, temperature)

    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scorer.sum_pi_squared(batch, temperature)

    def forward_backward(self, batch: TrainBatch, loss: LossPlan, counts: LossCounts) -> ForwardBackwardStats:
        total, sums, policy_logprobs = 0.0, Counter[str](), []
        self.recompute_activations(True)
        reference = self._reference if loss.kl_coef and loss.kl_estimator == "full" else None
        cut = micro_batches(
            batch.sequences,
            self.sequences_per_micro_batch,
            self.max_tokens_per_micro_batch,
            share_prompts=self.share_prompts,
        )
        for rows in cut:
            micro = batch.rows(rows)
            packed = pack(micro.sequences, self.model.device, share_prompts=self.share_prompts)
            scores = self._scorer.score(
                packed, loss.temperature, entropy_gradient=loss.entropy_coef > 0, reference=reference
            )
            logprobs, entropies = packed.unpack(scores.logprobs).cpu(), packed.unpack(scores.entropy).cpu()
            full_kl = packed.unpack(scores.full_kl).cpu() if scores.full_kl is not None else None
            micro_loss, micro_sums = policy_objective(logprobs, entropies, micro, loss, counts, full_kl)
            micro_loss.backward()
            total += micro_loss.item()
            sums.update(micro_sums)
            policy_logprobs.append(logprobs.detach())
        self.recompute_activations(False)
        return ForwardBackwardStats(
            loss=total,
            sums=dict(sums),
            tokens=int(batch.loss_mask.sum()),
            policy_logprobs=in_row_order(policy_logprobs, cut),
        )


def _check_same_vocabulary(policy: PreTrainedModel, reference: PreTrainedModel) -> None:
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            Problem(
                f"loss.kl_estimator=full compares whole vocabularies: the policy's has {sizes[0]} tokens, the reference's "
                f"{sizes[1]}",
                fix="use a reference of the policy's family, or another estimator, such as loss.kl_estimator=k3",
                field="reference.path",
            )
        )
