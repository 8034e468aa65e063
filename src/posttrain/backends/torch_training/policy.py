"""The policy: a causal language model that is scored and updated, for any sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.algos.objective import policy_objective
from posttrain.algos.preferences import preference_loss
from posttrain.backends.torch_training.distilling import TeachersOfRow, comparison_of
from posttrain.backends.torch_training.moving_reference import MovingReference
from posttrain.backends.torch_training.optimized_model import Learning, MicroBatch, OptimizedModel
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.config import TrainingConfig
from posttrain.errors import ModelError, Problem, RequestError
from posttrain.models.routing import Routers
from posttrain.records.batches import LossCounts, SequenceBatch, TeacherScores, TrainBatch
from posttrain.records.plans import DistillationPlan, LossPlan, PreferencePlan
from posttrain.records.span_tensors import row_counts, zero_rows
from posttrain.records.statistics import ForwardBackwardStats


class PolicyModel(OptimizedModel):
    """See interfaces.train_engine.TrainEngine."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sequences_per_scoring_batch: int,
        max_tokens_per_scoring_batch: int | None = None,  # replaces the number of sequences
        reference: LogprobScorer | None = None,  # for the KL over the whole vocabulary (kl_estimator full) in the loss
        moving_reference: MovingReference | None = None,  # follows this policy
        routers: Routers | None = None,  # that replay experts, or are balanced by the loss
        teachers: Mapping[str, LogprobScorer] | None = None,  # compared over the whole vocabulary, by name
        **how: Unpack[Learning],
    ):
        # Before the model is sharded: the form of its head is detected by running it.
        self._scorer = LogprobScorer(
            model,
            sequences_per_scoring_batch,
            how.get("share_prompts", True),
            max_tokens_per_micro_batch=max_tokens_per_scoring_batch,
            padded=how.get("padded", False),
            sharding=how.get("sharding"),
            notices=how.get("notices"),
            routers=routers,
        )
        self._routers = routers
        self._reference = reference
        if reference:
            _check_same_vocabulary(model, reference.model)
        self._teachers = teachers or {}
        super().__init__(model, tokenizer, **how)
        self._moving = moving_reference
        if moving_reference:
            moving_reference.check_fits(self._masters.parameters, self._sharding.shape)

    @staticmethod
    def sharding_of(
        config: TrainingConfig, role: str, device: torch.device, compute_dtype: torch.dtype
    ) -> Sharding | None:
        """Return how this engine splits a role's model over the processes that have met; None: each process has all of it.

        Raises: ConfigError for engine options that cannot be.
        """
        return None

    @staticmethod
    def scorer(
        model: PreTrainedModel,
        sequences_per_micro_batch: int,
        share_prompts: bool = True,
        max_tokens_per_micro_batch: int | None = None,
        *,
        padded: bool = False,
        weights: Callable[[], AbstractContextManager[Any]] = nullcontext,
        rests_on_cpu: bool = False,
        sharding: Sharding | None = None,
    ) -> LogprobScorer:
        """Build a scorer of a separate frozen model (the reference), or of this engine's model with other weights."""
        return LogprobScorer(
            model,
            sequences_per_micro_batch,
            share_prompts,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            padded=padded,
            weights=weights,
            rests_on_cpu=rests_on_cpu,
            sharding=sharding,
        )

    @property
    def note(self) -> str | None:
        return "; ".join(filter(None, [self._scorer.note, *self.notes])) or None

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scorer.logprobs(batch, temperature)

    def logprobs_and_experts(self, batch: SequenceBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return self._scorer.logprobs_and_experts(batch, temperature)

    def entropies(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scorer.entropies(batch, temperature)

    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._scorer.sum_pi_squared(batch, temperature)

    def reference_kl(self, batch: SequenceBatch, temperature: float) -> Tensor:
        assert self._reference is not None, "a KL over the vocabulary is computed beside the reference"
        return self._scorer.reference_kl(batch, temperature, self._reference)

    def divergence(self, batch: SequenceBatch, teachers: Mapping[str, TeacherScores], plan: DistillationPlan) -> Tensor:
        return self._scorer.divergence(batch, teachers, plan, self._teachers)

    def move_reference(self, mix: float) -> None:
        assert self._moving is not None, "a reference that moves is given to the policy's engine"
        self._moving.move(self._masters.whole(self._sharding), mix)

    def saved_bytes(self) -> int:
        return super().saved_bytes() + (self._moving.saved_bytes() if self._moving else 0)

    def writer(self, *, optimizer: bool = True, sharded: bool = False) -> Callable[[Path], None]:
        """Begin a save; with the optimizer, it includes the weights of a reference that moves: both are state of the run."""
        write = super().writer(optimizer=optimizer, sharded=sharded)
        if self._moving is None or not optimizer:
            return write
        write_reference = self._moving.writer(sharded=sharded)

        def write_both(folder: Path) -> None:
            write(folder)
            write_reference(folder)

        return write_both

    def load(self, folder: Path, *, optimizer: bool = True, schedule: bool = True) -> None:
        super().load(folder, optimizer=optimizer, schedule=schedule)
        if self._moving and optimizer:
            self._moving.load(folder)

    def forward_backward(
        self, batch: TrainBatch, loss: LossPlan | PreferencePlan, counts: LossCounts
    ) -> ForwardBackwardStats:
        if isinstance(loss, PreferencePlan):
            return self._learn_preferences(batch, loss, counts)
        reference = self._reference if loss.kl_coef and loss.kl_estimator == "full" else None

        balance = self._balance(batch, loss.router_balance_coef)
        distillation = loss.distillation if loss.distillation and loss.distillation.in_forward_pass else None
        how = comparison_of(distillation) if distillation else None

        def learn(micro: TrainBatch) -> MicroBatch:
            packed = self._scorer.pack(micro.sequences, share_prompts=self.cutter.share_prompts)
            teachers = None
            if distillation and how:
                teachers = TeachersOfRow(
                    plan=distillation, how=how, answers=micro.teachers, models=self._teachers, packed=packed
                )
            scores = self._scorer.score(
                packed,
                loss.temperature,
                entropy_gradient=loss.entropy_coef > 0,
                reference=reference,
                teachers=teachers,
                counted=packed.of_responses(micro.loss_mask.any(dim=1)) if balance else None,
            )
            logprobs, entropies = packed.unpack(scores.logprobs).cpu(), packed.unpack(scores.entropy).cpu()
            full_kl = packed.unpack(scores.full_kl).cpu() if scores.full_kl is not None else None
            divergence = packed.unpack(scores.divergence).cpu() if scores.divergence is not None else None
            micro_loss, sums = policy_objective(logprobs, entropies, micro, loss, counts, full_kl, divergence)
            if not micro_loss.requires_grad:
                raise _without_gradient(loss)
            if balance:
                part = self._sharding.over_sequence(balance(self.device))
                micro_loss = micro_loss + loss.router_balance_coef * part.cpu()
                sums["policy/router_balance"] = float(part.detach()) * counts.tokens
            flat = not balance and is_flat(micro_loss, logprobs, entropies, full_kl, divergence)
            return MicroBatch(loss=micro_loss, sums=sums, values=logprobs.detach(), flat=flat)

        still = None
        if loss.from_advantages_alone:
            still = zero_rows(batch.advantages) | (row_counts(batch.loss_mask) == 0)
        try:
            total, sums, policy_logprobs = self.accumulate(batch, learn, still)
        finally:
            if self._routers:
                self._routers.clear()
        return ForwardBackwardStats(
            loss=total, sums=sums, tokens=int(row_counts(batch.loss_mask).sum()), policy_logprobs=policy_logprobs
        )

    def _learn_preferences(self, batch: TrainBatch, loss: PreferencePlan, counts: LossCounts) -> ForwardBackwardStats:
        """Add the gradient of a tuning method's loss. Rows of a pair share their prompt, which is computed once."""
        self.cutter.rows_together = loss.rows_per_unit

        def learn(micro: TrainBatch) -> MicroBatch:
            packed = self._scorer.pack(micro.sequences, share_prompts=self.cutter.share_prompts)
            logprobs = packed.unpack(self._scorer.score(packed, 1.0).logprobs).cpu()
            return MicroBatch(loss=preference_loss(logprobs, micro, loss, counts), sums={}, values=logprobs.detach())

        total, sums, policy_logprobs = self.accumulate(batch, learn)
        tokens = int(row_counts(batch.loss_mask).sum())
        return ForwardBackwardStats(loss=total, sums=sums, tokens=tokens, policy_logprobs=policy_logprobs)

    def _balance(self, batch: TrainBatch, coef: float) -> Callable[[torch.device], Tensor] | None:
        """Return the function that gives a pass's part of the balance loss; None without one. A pass over the whole mini-batch
        counts the tokens of every expert first: their shares are factors of every micro-batch's loss."""
        if not coef:
            return None
        routers = self._routers
        assert routers is not None, "routers are given to an engine whose loss balances them"
        counts = self._expert_counts(batch, routers)
        assigned = counts.sum(dim=1, keepdim=True).clamp(min=1)
        tokens = float(counts.sum()) / (routers.layers * routers.chosen)
        return lambda device: routers.balance((counts / assigned).to(device), tokens)

    @torch.no_grad()
    def _expert_counts(self, batch: TrainBatch, routers: Routers) -> Tensor:
        """Count the learned tokens of a mini-batch that each expert gets, on all processes, [layers, experts]."""
        whole = self.cutter.cut(batch.sequences)
        loads = [self.cutter.tokens(batch.sequences, rows) for rows in whole]
        counts: Tensor | None = None
        self._sharding.begin(batch.sequences.images)
        for rows in self._sharding.deal(whole, loads):
            micro = batch.rows(rows or [0])
            packed = self._scorer.pack(micro.sequences, share_prompts=self.cutter.share_prompts)
            learned = packed.of_responses(micro.loss_mask.any(dim=1)) & bool(rows)
            self._scorer.score(packed, 1.0, counted=learned)
            found = routers.counts()
            counts = found if counts is None else counts + found
        assert counts is not None, "every process has a micro-batch"
        counts = self._sharding.over_sequence(counts).cpu()
        places = {f"{layer} {expert}": float(n) for layer, row in enumerate(counts) for expert, n in enumerate(row)}
        total = self._sharding.total(places)
        return torch.tensor([total[name] for name in places], dtype=torch.float64).view_as(counts)


def is_flat(loss: Tensor, *values: Tensor | None) -> bool:
    """True when the loss does not change with any of the values, from which alone it is computed: what lies behind them then has
    a gradient of 0."""
    moving = [each for each in values if each is not None and each.requires_grad]
    gradients = torch.autograd.grad(loss, moving, retain_graph=True, allow_unused=True, materialize_grads=True)
    return not any(bool(each.any()) for each in gradients)


def _without_gradient(loss: LossPlan) -> RequestError:
    where = f" of {loss.path}" if loss.path else ""
    what = f"the loss {loss.name}{where} does not depend on policy_logprobs, so nothing can be learned from it"
    fix = "compute it from policy_logprobs, without detach() or torch.no_grad()"
    return RequestError(Problem(what, fix=fix, field="loss.name"))


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
