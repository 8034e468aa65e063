"""Scores of response tokens from a Hugging Face model, packed, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.algos.fused_scoring import TokenScores, score_logits, score_tokens
from posttrain.data.micro_batches import in_row_order, micro_batches
from posttrain.data.packing import PackedSequences, pack
from posttrain.models.head import HeadForm, head_form, last_hidden_states
from posttrain.models.packed_attention import shared_layout
from posttrain.records.batches import SequenceBatch


class Scorer:
    """A model that scores responses (the reference, or the policy between updates and in them).

    The model's body makes hidden states; its head is applied to scored positions only, and never leaves their logits in
    memory. Where a model makes its logits in a way that is not known, they are computed whole: ``note`` says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sequences_per_micro_batch: int | None,
        share_prompts: bool = True,
        *,
        max_tokens_per_micro_batch: int | None = None,
    ):
        self.model = model
        self.share_prompts = share_prompts
        self.sequences_per_micro_batch = sequences_per_micro_batch
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.head = head_form(model)

    @property
    def note(self) -> str | None:
        """Why the logits of this model are computed whole; None when they are not."""
        if isinstance(self.head, HeadForm):
            return None
        return (
            f"{type(self.model).__name__}: {self.head}; its logits are computed whole, which takes more memory and time and "
            "gives the same numbers"
        )

    @torch.no_grad()
    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """See interfaces.train_engine.ScoringEngine."""
        return self._over_batch(batch, lambda packed: self.score(packed, temperature).logprobs)

    @torch.no_grad()
    def sum_pi_squared(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Sum of the squared probabilities at every response token (algos.logprobs), [B, T], 0 where response_mask is
        False. No gradient."""
        return self._over_batch(
            batch, lambda packed: self.score(packed, temperature, sum_pi_squared=True).sum_pi_squared
        )

    def _over_batch(self, batch: SequenceBatch, scores: Callable[[PackedSequences], Tensor | None]) -> Tensor:
        cut = micro_batches(
            batch, self.sequences_per_micro_batch, self.max_tokens_per_micro_batch, share_prompts=self.share_prompts
        )
        parts = []
        for rows in cut:
            packed = pack(batch.rows(rows), self.model.device, share_prompts=self.share_prompts)
            found = scores(packed)
            assert found is not None, "what was asked for is there"
            parts.append(packed.unpack(found).cpu())
        return in_row_order(parts, cut)

    def score(
        self,
        packed: PackedSequences,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        sum_pi_squared: bool = False,
        reference: Scorer | None = None,
    ) -> TokenScores:
        """The M response tokens, carrying gradient where that is on; with a reference also the KL to it over the whole
        vocabulary, for which the reference reads the same packed row. Only its hidden states at the scored positions are
        kept until the backward pass."""
        head, their_head = self.head, reference.head if reference else None
        if isinstance(head, str) or isinstance(their_head, str):
            with torch.no_grad():
                reference_logits = response_logits(reference.model, packed) if reference else None
            return score_logits(
                response_logits(self.model, packed),
                packed.targets,
                temperature=temperature,
                entropy_gradient=entropy_gradient,
                sum_pi_squared=sum_pi_squared,
                reference_logits=reference_logits,
            )
        with torch.no_grad():
            theirs = (reference.hidden(packed), their_head.of(reference.model)) if reference and their_head else None
        return score_tokens(
            self.hidden(packed),
            head.of(self.model),
            packed.targets,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            sum_pi_squared=sum_pi_squared,
            reference=theirs,
        )

    def hidden(self, packed: PackedSequences) -> Tensor:
        """Hidden states that predict the scored tokens, [M, H]."""
        states = last_hidden_states(
            self.model,
            shared_layout(packed.groups, packed.token_ids.device),
            input_ids=packed.token_ids[None],
            position_ids=packed.position_ids[None],
        )
        return states[0, packed.predicting]


def response_logits(model: PreTrainedModel, packed: PackedSequences) -> Tensor:
    """Logits that predict the scored tokens, [M, vocabulary], from the model's own forward pass."""
    output = model(
        input_ids=packed.token_ids[None],
        position_ids=packed.position_ids[None],
        attention_layout=shared_layout(packed.groups, packed.token_ids.device),
        logits_to_keep=packed.predicting,
        use_cache=False,
    )
    return output.logits[0]
