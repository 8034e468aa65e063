"""Scores of response tokens from a Hugging Face model, on packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.algos.fused_divergence import top_of_logits, top_tokens
from posttrain.algos.fused_scoring import TokenScores, score_logits, score_tokens
from posttrain.algos.own_distributions import head_logits, score_own
from posttrain.backends.torch_training.distilling import TeachersOfRow, comparison_of
from posttrain.backends.torch_training.memory import Cutter, is_out_of_memory
from posttrain.backends.torch_training.sharding import Row, Sharding
from posttrain.data.packing import PackedSequences, pack, unpack_tokens
from posttrain.models.head import HeadForm, head_form, last_hidden_states, states_at
from posttrain.models.routing import Routers
from posttrain.records.batches import SequenceBatch, TeacherScores, take_rows
from posttrain.records.notices import Notices
from posttrain.records.plans import DistillationPlan


class LogprobScorer:
    """A model that scores responses: the reference, or the policy between and during updates.

    The model's body computes hidden states; its head is applied to scored positions only, without keeping their logits in
    memory. For a model with an unknown form of head the logits are computed whole, and ``note`` gives the reason.

    Args: weights is a context that activates the weights to score with, such as without the adapter; with rests_on_cpu the
        model is on its device only while a batch is scored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sequences_per_micro_batch: int | None,
        share_prompts: bool = True,
        *,
        max_tokens_per_micro_batch: int | None = None,
        padded: bool = False,
        weights: Callable[[], AbstractContextManager[Any]] = nullcontext,
        rests_on_cpu: bool = False,
        sharding: Sharding | None = None,
        notices: Notices | None = None,
        routers: Routers | None = None,
    ):
        self.model = model
        self.padded = padded
        self.sharding = sharding or Sharding()
        self.cutter = Cutter(
            sequences_per_micro_batch,
            self.sharding.pooled(max_tokens_per_micro_batch),
            share_prompts=share_prompts and not padded,
            notices=notices,
            what="a scoring batch",
        )
        self.head = head_form(model)
        self.vocabulary: int | None = None  # of a teacher: its student knows token ids below this; None knows all
        self.routers = routers  # that use the experts of the batch, where it has any; None: every router chooses itself
        self._weights = weights
        self._device = model.device
        self._rests = rests_on_cpu
        self._rest()

    @property
    def note(self) -> str | None:
        """Messages for the user, such as the reason why the logits of this model are computed whole."""
        told = []
        if not isinstance(self.head, HeadForm):
            told.append(
                f"{type(self.model).__name__}: {self.head}; its logits are computed whole, which takes more memory and time "
                "and gives the same numbers"
            )
        if self._rests and self._device.type == "cpu":
            told.append("no effect of reference.offload: everything is on the CPU already")
        return "; ".join(told) or None

    def pack(self, batch: SequenceBatch, *, share_prompts: bool | None = None) -> PackedSequences:
        shared = self.cutter.share_prompts if share_prompts is None else share_prompts
        return pack(batch, self._device, share_prompts=shared, padded=self.padded)

    @torch.no_grad()
    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """See interfaces.train_engine.ScoringEngine."""
        return self._over_batch(batch, lambda packed: self.score(packed, temperature).logprobs)

    @torch.no_grad()
    def logprobs_and_experts(self, batch: SequenceBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """See interfaces.train_engine.TrainEngine."""
        routers = self.routers
        assert routers is not None, "routers are given to an engine whose updates replay them"
        whole = batch.tokens.shape[1], routers.layers, routers.chosen

        def of(packed: PackedSequences, rows: list[int]) -> Tensor:
            with routers.recording() as recorded:
                logprobs = packed.unpack(self.score(packed, temperature).logprobs).cpu()
            of_tokens = self.sharding.of_all_tokens(routers.stacked(recorded))
            experts = unpack_tokens(
                of_tokens, batch.rows(rows), share_prompts=self.cutter.share_prompts, padded=self.padded
            )
            # One tensor, which processes join as they join log-probs; float32 holds the numbers of experts exactly.
            return torch.cat([logprobs, experts.flatten(1).float()], dim=1)

        joined = self._over_parts(batch, of)
        logprobs, experts = joined.split([batch.response_mask.shape[1], math.prod(whole)], dim=1)
        return logprobs.contiguous(), experts.to(torch.int16).view(len(batch), *whole)

    @torch.no_grad()
    def entropies(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """See interfaces.train_engine.ScoringEngine."""
        return self._over_batch(batch, lambda packed: self.score(packed, temperature).entropy)

    @torch.no_grad()
    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Compute the sum of squared probabilities at every response token (algos.logprobs), [B, T], 0 where response_mask is
        False. No gradient."""
        return self._over_batch(
            batch, lambda packed: self.score(packed, temperature, sum_pi_squared=True).sum_pi_squared
        )

    @torch.no_grad()
    def reference_kl(self, batch: SequenceBatch, temperature: float, reference: LogprobScorer) -> Tensor:
        """Compute the KL to a reference over the vocabulary at every response token, [B, T], 0 where response_mask is False."""
        return self._over_batch(batch, lambda packed: self.score(packed, temperature, reference=reference).full_kl)

    @torch.no_grad()
    def top_logprobs(self, batch: SequenceBatch, temperature: float, k: int) -> Tensor:
        """See interfaces.train_engine.TeacherEngine."""
        return self._over_batch(batch, lambda packed: self._top(packed, temperature, k))

    @torch.no_grad()
    def divergence(
        self,
        batch: SequenceBatch,
        answers: Mapping[str, TeacherScores],
        plan: DistillationPlan,
        teachers: Mapping[str, LogprobScorer],
    ) -> Tensor:
        """Compute the divergence from teachers at every response token, [B, T], 0 where response_mask is False. No gradient."""
        how = comparison_of(plan)

        def of(packed: PackedSequences, rows: list[int]) -> Tensor | None:
            mine = TeachersOfRow(plan=plan, how=how, answers=take_rows(answers, rows), models=teachers, packed=packed)
            return self.score(packed, plan.temperature, teachers=mine).divergence

        return self._over_rows(batch, of)

    def _over_batch(self, batch: SequenceBatch, scores: Callable[[PackedSequences], Tensor | None]) -> Tensor:
        return self._over_rows(batch, lambda packed, rows: scores(packed))

    def _over_rows(self, batch: SequenceBatch, scores: Callable[[PackedSequences, list[int]], Tensor | None]) -> Tensor:
        def of(packed: PackedSequences, rows: list[int]) -> Tensor:
            found = scores(packed, rows)
            assert found is not None, "the requested scores are present"
            return (packed.unpack(found) if found.ndim == 1 else packed.unpack_several(found)).cpu()

        return self._over_parts(batch, of)

    def _over_parts(self, batch: SequenceBatch, part: Callable[[PackedSequences, list[int]], Tensor]) -> Tensor:
        """Compute ``part`` of every packed micro-batch and its rows, [b, n], as [B, n]."""

        def of(rows: list[int]) -> Tensor:
            return part(self.pack(batch.rows(rows)), rows)

        if self._rests:
            self.model.to(self._device)  # type: ignore[arg-type]  # transformers hides the method's type behind a wrapper
        try:
            return over_rows(batch, self.cutter, self.sharding, of)
        finally:
            if self.routers:
                self.routers.clear()
            self._rest()

    def _rest(self) -> None:
        if self._rests:
            self.model.to("cpu")  # type: ignore[arg-type]

    def score(
        self,
        packed: PackedSequences,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        sum_pi_squared: bool = False,
        reference: LogprobScorer | None = None,
        teachers: TeachersOfRow | None = None,
        counted: Tensor | None = None,
    ) -> TokenScores:
        """Score the M response tokens, carrying gradient where it is enabled; with a reference also the KL to it over the whole
        vocabulary, for which the reference reads the same packed row. Only its hidden states at the scored positions are
        kept until the backward pass. With teachers, the divergence from them in the same way. The routers are prepared for this
        pass, and its backward pass: counted as in ``Routers.prepare``."""

        row = self._row(packed, counted)

        def scores() -> tuple[Tensor | None, ...]:
            found = self._score(row, temperature, entropy_gradient, sum_pi_squared, reference, teachers)
            return found.logprobs, found.entropy, found.sum_pi_squared, found.full_kl, found.divergence

        with self._weights():
            found = self.sharding.forward(self.model, scores)
        logprobs, entropy, pi_squared, full_kl, divergence = (
            None if each is None else self.sharding.collected(each, row, packed) for each in found
        )
        assert logprobs is not None and entropy is not None
        return TokenScores(
            logprobs=logprobs, entropy=entropy, sum_pi_squared=pi_squared, full_kl=full_kl, divergence=divergence
        )

    def _row(self, packed: PackedSequences, counted: Tensor | None = None) -> Row:
        row = self.sharding.row(packed, counted)
        if self.routers:
            self.routers.prepare(row.experts, row.counted)
        return row

    def _top(self, packed: PackedSequences, temperature: float, k: int) -> Tensor:
        """Find the k most likely tokens at the M response tokens, [M, 2, k]. See algos.fused_divergence.top_tokens."""
        row = self._row(packed)

        def top() -> Tensor:
            if isinstance(self.head, str):
                logits = response_logits(self.model, row)[..., : self.vocabulary]
                return top_of_logits(logits, k, temperature=temperature)
            head = self.head.of(self.model)
            return top_tokens(self.hidden(row), head, k, temperature=temperature, vocabulary=self.vocabulary)

        with self._weights():
            return self.sharding.collected(self.sharding.forward(self.model, top), row, packed)

    def _score(
        self,
        row: Row,
        temperature: float,
        entropy_gradient: bool,
        sum_pi_squared: bool,
        reference: LogprobScorer | None,
        teachers: TeachersOfRow | None,
    ) -> TokenScores:
        head, their_head = self.head, reference.head if reference else None
        if isinstance(head, str) or isinstance(their_head, str) or (teachers and teachers.needs_logits):
            logits = response_logits(self.model, row)
            found = score_logits(
                logits,
                row.targets,
                temperature=temperature,
                entropy_gradient=entropy_gradient,
                sum_pi_squared=sum_pi_squared,
                reference_logits=reference.frozen_logits(row) if reference else None,
            )
            found = with_own(found, row, logits, lambda some: some, entropy_gradient)
            return replace(found, divergence=teachers.divergence_of_logits(row, logits)) if teachers else found
        theirs = None
        if reference and their_head:
            theirs = (reference.frozen_hidden(row), their_head.of(reference.model))
        hidden, own_head = self.hidden(row), head.of(self.model)
        found = score_tokens(
            hidden,
            own_head,
            row.targets,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            sum_pi_squared=sum_pi_squared,
            reference=theirs,
        )
        found = with_own(found, row, hidden, lambda some: head_logits(some, own_head), entropy_gradient)
        return replace(found, divergence=teachers.divergence(row, hidden, own_head)) if teachers else found

    @torch.no_grad()
    def frozen_hidden(self, row: Row) -> Tensor:
        """Compute ``hidden`` of a reference, while another model is being scored."""
        with self._weights():
            return self.hidden(row)

    @torch.no_grad()
    def frozen_logits(self, row: Row) -> Tensor:
        with self._weights():
            return response_logits(self.model, row)

    def hidden(self, row: Row) -> Tensor:
        """Compute the hidden states that predict the scored tokens, [m, H]."""
        states = last_hidden_states(self.model, row.layout, **row.inputs(self.model))
        return states_at(states[0], row.predicting)


def with_own(
    found: TokenScores, row: Row, inputs: Tensor, logits: Callable[[Tensor], Tensor], entropy_gradient: bool
) -> TokenScores:
    """Replace the scores of tokens that were drawn from distributions of their own; those of comparisons stay. Args: inputs [m,
    ...], of which ``logits`` makes those of some rows."""
    own = row.own
    if own is None or not len(own.places):
        return found
    some = score_own(
        states_at(inputs, own.places),
        logits,
        row.targets[own.places],
        own.temperatures,
        own.which,
        own.allowed,
        entropy_gradient=entropy_gradient,
    )

    def placed(values: Tensor, new: Tensor | None) -> Tensor:
        assert new is not None
        return values.index_copy(0, own.places, new.to(values.dtype))

    squares = found.sum_pi_squared
    return replace(
        found,
        logprobs=placed(found.logprobs, some.logprobs),
        entropy=placed(found.entropy, some.entropy),
        sum_pi_squared=None if squares is None else placed(squares, some.sum_pi_squared),
    )


def over_rows(batch: SequenceBatch, cutter: Cutter, sharding: Sharding, of: Callable[[list[int]], Tensor]) -> Tensor:
    """Compute ``of(rows)``, [b, T], for every micro-batch of a batch, as [B, T]. No gradient: a part that exceeds the memory is
    cut and repeated alone."""
    sharding.begin(batch.images)
    whole = cutter.cut(batch)
    waiting = sharding.deal(whole, [cutter.tokens(batch, rows) for rows in whole])[::-1]
    found: list[Tensor] = []
    order: list[int] = []
    nothing = torch.zeros(0, *batch.response_mask.shape[1:])
    while waiting:
        rows, done = waiting.pop(), None
        try:
            done = of(rows or [0])
        except RuntimeError as error:
            if not (is_out_of_memory(error) and sharding.splits_when_out_of_memory):
                raise
        if done is None:
            cutter.shrink(batch, rows)
            middle = (len(rows) + 1) // 2
            waiting += [rows[middle:], rows[:middle]]
        elif rows:
            found.append(done)
            order += rows
        else:  # computed for the collective calls alone; [0, T], or [0, T, 2, k] of the most likely tokens
            nothing = done[:0]
    return sharding.joined(torch.cat(found or [nothing]), order, len(batch))


def response_logits(model: PreTrainedModel, row: Row) -> Tensor:
    """Compute the logits that predict the scored tokens, [m, vocabulary], with the model's own forward pass."""
    # Responses with a shared prompt are predicted from the same last token.
    positions, each = row.predicting.unique(return_inverse=True)
    shared = len(positions) < len(each)
    output = model(
        **row.inputs(model),
        attention_layout=row.layout,
        logits_to_keep=positions if shared else row.predicting,
        use_cache=False,
    )
    return states_at(output.logits[0], each) if shared else output.logits[0]
