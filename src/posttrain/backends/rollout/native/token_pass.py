"""Forward passes during sampling: over packed prompts, and over one token of every active sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.algos.fused_scoring import score_tokens
from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.decoder import Decoder
from posttrain.backends.rollout.native.graphs import GraphedStep, unrecordable
from posttrain.backends.rollout.native.int8 import int8_products
from posttrain.backends.rollout.native.kept_products import KeptProducts
from posttrain.backends.rollout.native.kernels import DTYPES, PassKernels, load_kernels
from posttrain.backends.rollout.native.listed_step import ListedStep
from posttrain.backends.rollout.native.products import FEWEST_ROWS, product_kernels
from posttrain.backends.rollout.native.sampling import logit_rows, logprob_of
from posttrain.backends.rollout.native.trial import fast_pass, logits_by_modules
from posttrain.errors import ConfigError, Problem
from posttrain.models.attention import CachedRows
from posttrain.models.head import HeadForm, last_hidden_states

ROW_STEP = 8  # larger numbers of rows are rounded up to it, so that the matrix library sees few shapes


class TokenPass:
    """One new token per row: with the fast pass where it matches the model, else with the model's own modules.

    Args: int8: the fast pass multiplies by weights that are rounded to eight bits.
    Raises: ConfigError for int8 and a model without a fast pass.
    """

    def __init__(self, model: PreTrainedModel, *, int8: bool = False):
        self.model = model
        self.int8 = int8
        self._own_products = False  # nothing goes through the matrix library
        self.decoder: Decoder | None = None  # the fast pass
        self.note = ""  # message for the user: why sampling is slower than it could be
        self._form = HeadForm()
        self.graphed: GraphedStep | None = None
        self._listed: ListedStep | None = None
        loaded = _kernels(model)
        kernels = None if isinstance(loaded, str) else loaded
        found = fast_pass(model, kernels)
        if isinstance(found, str):
            if int8:
                raise ConfigError(_no_int8(found))
            self.note = f"sampling goes through transformers' own modules, which is slower: {found}"
            return
        self.decoder, self._form = found
        if isinstance(loaded, str):
            self.note = f"sampling goes without compiled kernels, which is slower: {loaded}"
        elif self.decoder.kernels is not kernels:
            self.note = f"sampling goes without compiled kernels, which is slower: {self.decoder.unused_kernels}"
        elif kernels is not None and not self.decoder.compiled_attention:
            reason = self.decoder.unused_attention
            self.note = f"attention goes without compiled kernels, which is slower: {reason}"
        elif kernels is not None and not self.decoder.compiled_states:
            reason = self.decoder.unused_state_kernels
            self.note = f"layers that keep a state go through transformers' own modules, which is slower: {reason}"
        if model.device.type == "cuda" and self.decoder.compiled_attention:
            reason = unrecordable(model)
            self.graphed = None if reason else GraphedStep(self.decoder.step)
            if reason:
                self.note = f"passes are not recorded as CUDA graphs, which is slower: {reason}"
        self._listed = ListedStep(self.decoder)
        if self._round_weights(self.decoder) if int8 else product_kernels(model.get_output_embeddings().weight):
            self.decoder.fewest_rows = 1
            # Of a mixture of experts the routers do, and of latent attention the products of each head.
            compiled = self.decoder.compiled_attention and self.decoder.compiled_states
            self._own_products = compiled and not self.decoder.has_experts and not self.decoder.latent

    def _round_weights(self, decoder: Decoder) -> bool:
        """Have the pass multiply by weights of eight bits, from the next time that it reads them. Returns: True for kernels."""
        stack, reason = int8_products(self.model.dtype, self.model.device)
        decoder.products = KeptProducts(stack)
        if reason:
            slow = f"weights of eight bits save no time without compiled kernels: {reason}"
            self.note = "; ".join(note for note in (self.note, slow) if note)
        return not reason

    def rows_for(self, responses: int, most: int) -> int:
        """Return how many rows, up to ``most``, a pass for so many responses has. Those that fill it up, for the matrix library,
        keep the order of its sums, and its shapes few."""
        if self._own_products:
            return responses
        rows = max(responses, FEWEST_ROWS)
        return min(-(-rows // ROW_STEP) * ROW_STEP if rows > ROW_STEP else rows, most)

    @contextmanager
    def holding_weights(self) -> Iterator[None]:
        """Use the model's current weights inside the ``with`` block. Copies of them are kept for the next one, which makes those
        again whose weights have changed."""
        if self.decoder is not None:
            self.decoder.read_weights()
        try:
            yield
        finally:
            if self.graphed is not None:
                self.graphed.clear()
            if self._listed is not None:
                self._listed.clear()
            if self.decoder is not None:
                self.decoder.drop_weights()

    def new_cache(self, most_slots: int | None = None) -> KeyValueCache:
        """Create a cache for these passes, whose reserve has up to ``most_slots`` slots."""
        return KeyValueCache.of(self.model, most_slots) if self.decoder is None else self.decoder.new_cache(most_slots)

    def weights_changed(self) -> None:
        """Free the copies of older weights."""
        if self.decoder is not None:
            self.decoder.products.clear()

    def prefill(
        self,
        inputs: dict[str, Any],
        layout: Any,
        cache: KeyValueCache,
        ends: Tensor,
        following: Tensor | None,
        top: int = 0,
    ) -> tuple[Tensor, Tensor | None, list[tuple[tuple[int, float], ...]]]:
        """Prefill packed prompts, whose keys and values go to the announced places of the cache.

        Args: inputs, layout: the model's, of N tokens in one row; ends [n] int64: last positions of the prompts; following [N]
            int64: the token after each, where log-probs are requested; top: likeliest tokens at each place beside them.
        Returns: logits at ``ends``, [n, vocabulary]; the log-prob of each following token under the plain distribution
            (temperature 1, uncut), [N] nats, for which not all logits are kept where the head's form is known; and the likeliest
            tokens at each place with their log-probs, in descending order, where requested.
        """
        if self.decoder is not None and (following is not None or _plain(inputs)):
            if _plain(inputs):
                wanted = ends if following is None else None
                ids, positions = inputs["input_ids"][0], inputs["position_ids"][0]
                states = self.decoder.prefill(ids, positions, layout, cache, wanted)
            else:
                states = last_hidden_states(self.model, layout, **inputs, past_key_values=cache)[0]
            if following is None:
                return self.logits(states), None, []
            pieces = map(self.logits, states.split(logit_rows(states.device)))
            if top > 0:
                return self.logits(states[ends]), *_likeliest(pieces, following, top)
            if self.int8:
                return self.logits(states[ends]), _logprobs(pieces, following), []
            head = self._form.of(self.model)
            return self.logits(states[ends]), score_tokens(states, head, following, temperature=1.0).logprobs, []
        logits: Tensor = self.model(
            **inputs,
            past_key_values=cache,
            attention_layout=layout,
            logits_to_keep=ends if following is None else 0,
            use_cache=False,
        ).logits[0]
        if following is None:
            return logits, None, []
        pieces = iter(logits.split(logit_rows(logits.device)))
        if top > 0:
            return logits[ends], *_likeliest(pieces, following, top)
        return logits[ends], _logprobs(pieces, following), []

    def __call__(self, token_ids: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        """Decode one token per row. Returns: input of ``logits``, [rows, ...]. The cache must know the rows (``decoding``).

        Args: token_ids, positions [rows] int64.
        """
        if self.decoder is None:
            return logits_by_modules(self.model, token_ids, positions, cache, CachedRows(cache))
        step = self.graphed or self._listed or self.decoder.step
        return step(token_ids, positions, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, [some of the rows, vocabulary]."""
        if self.decoder is None:
            return hidden
        logits = self.decoder.head(hidden)
        if self._form.scale != 1.0:
            logits = logits * self._form.scale
        if self._form.softcap is not None:
            logits = self._form.softcap * torch.tanh(logits / self._form.softcap)
        return logits


def _kernels(model: PreTrainedModel) -> PassKernels | str | None:
    """Return the kernels for the model's device and dtype, or why they cannot be had; None where there are none."""
    if model.device.type == "cuda":
        try:
            from posttrain.backends.rollout.native.triton_kernels import load_triton_kernels
        except ImportError as error:
            return f"Triton cannot be imported ({error})"
        return load_triton_kernels(model.dtype)
    return load_kernels(model.dtype) if model.device.type == "cpu" and model.dtype in DTYPES else None


def _plain(inputs: Mapping[str, Any]) -> bool:
    """Return True for tokens with one position each: no images, and no positions in a plane."""
    return set(inputs) == {"input_ids", "position_ids"} and inputs["position_ids"].dim() == 2


def _no_int8(reason: str) -> Problem:
    what = f"rollout.weights=int8 needs the fast passes of the native sampler, which this model has none of: {reason}"
    return Problem(what, fix="use rollout.weights=compute_dtype", field="rollout.weights")


def _logprobs(pieces: Iterable[Tensor], following: Tensor) -> Tensor:
    """Return the log-prob of each following token, [N] nats. Args: pieces, logits of consecutive places."""
    tokens = following.split(logit_rows(following.device))
    return torch.cat([logprob_of(some.float(), its) for some, its in zip(pieces, tokens, strict=True)])


def _likeliest(
    pieces: Iterable[Tensor], following: Tensor, top: int
) -> tuple[Tensor, list[tuple[tuple[int, float], ...]]]:
    """Return the log-prob of each following token, [N] nats, and the likeliest tokens at each place: both of one softmax, so that
    the likeliest token has the same log-prob in both. Args: pieces, logits of consecutive places."""
    found, likeliest = [], []
    for some, tokens in zip(pieces, following.split(logit_rows(following.device)), strict=True):
        logprobs = some.float().log_softmax(dim=1)
        found.append(logprobs.gather(1, tokens[:, None])[:, 0])
        best = logprobs.topk(min(top, logprobs.shape[1]), dim=1)
        places = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        likeliest += [tuple(zip(ids, values, strict=True)) for ids, values in places]
    return torch.cat(found), likeliest
