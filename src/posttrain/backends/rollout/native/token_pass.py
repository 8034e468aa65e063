"""The pass that takes every active sequence one token further, and the logits it ends in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.decoder import Decoder
from posttrain.backends.rollout.native.trial import fast_pass, logits_by_modules
from posttrain.models.attention import CachedRows
from posttrain.models.head import HeadForm


class TokenPass:
    """One new token per row: by the fast pass where it computes what the model does, by the model's own modules elsewhere."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.decoder: Decoder | None = None  # the fast pass
        self.note = ""  # for people: that it is the slow one, and why
        self._form = HeadForm()
        found = fast_pass(model)
        if isinstance(found, str):
            self.note = f"sampling goes through transformers' own modules, which is slower: {found}"
        else:
            self.decoder, self._form = found

    @contextmanager
    def holding_weights(self) -> Iterator[None]:
        """Inside, passes use the weights that the model has on entering. The copies that this may take are gone afterwards:
        making them costs no more than a pass, so there is no reason to keep them, or to wonder whether they are still right."""
        if self.decoder is not None:
            self.decoder.read_weights()
        try:
            yield
        finally:
            if self.decoder is not None:
                self.decoder.drop_weights()

    def __call__(self, token_ids: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        """What ``logits`` turns into logits, [rows, ...]. The cache has been told which rows they are.

        Args: token_ids, positions [rows] int64.
        """
        if self.decoder is None:
            return logits_by_modules(self.model, token_ids, positions, cache, CachedRows(cache))
        return self.decoder.step(token_ids, positions, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """[some of the rows, vocabulary]"""
        if self.decoder is None:
            return hidden
        logits = self.decoder.head(hidden)
        if self._form.scale != 1.0:
            logits = logits * self._form.scale
        if self._form.softcap is not None:
            logits = self._form.softcap * torch.tanh(logits / self._form.softcap)
        return logits
