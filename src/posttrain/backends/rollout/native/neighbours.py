"""Position embeddings that turn neighbouring numbers of a head, in passes whose kernels turn numbers that are half a head apart.

Queries and keys are put into the order of the kernels by their weights: the first numbers of all pairs, then the second ones. A
score is the same sum in another order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.backends.rollout.native.named_parts import attention_of, layers_of, rotary_of

PROBED = 3  # a position at which the pairs of a head are turned by different angles


def rotates_neighbours(attention: Any) -> bool:
    """Return True for an attention that turns neighbouring numbers. The function that models have for it is tried: a whole model
    with small weights would show the difference too little."""
    rotate = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    x = torch.arange(1.0, 9.0)
    return rotate is not None and torch.equal(rotate(x), torch.stack([-x[1::2], x[::2]], dim=-1).flatten())


def angles_once(model: PreTrainedModel) -> bool:
    """Return True where the angle of each pair that is half a head apart stands once. The function that turns queries and keys is
    tried."""
    body: Any = model.get_decoder()
    attention = next((each for layer in layers_of(body) if (each := attention_of(layer)) is not None), None)
    turn: Any = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    x, cos, sin = torch.arange(1.0, 9.0)[None, None, None], torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
    try:
        turned, _ = turn(x, x, cos, sin)
    except Exception:  # noqa: BLE001 - it takes as many angles as numbers, or is something else
        return False
    return torch.equal(turned, torch.cat([-x[..., 4:], x[..., :4]], dim=-1))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The pairs of a head that are turned."""

    rotated: int  # numbers of a head, from its beginning
    doubled: bool  # the angle of a pair stands twice side by side; else in both halves

    @classmethod
    def of(cls, model: PreTrainedModel) -> Neighbours | None:
        """Return the pairs of a model; None where numbers half a head apart are turned."""
        body: Any = model.get_decoder()
        attentions = [each for layer in layers_of(body) if (each := attention_of(layer)) is not None]
        if rotary_of(body) is None or not attentions or not all(map(rotates_neighbours, attentions)):
            return None
        kinds = () if not hasattr(body.rotary_emb, "layer_types") else (model.config.get_text_config().layer_types[0],)
        hidden = torch.zeros(1, 1, 1, device=model.device, dtype=model.dtype)
        cos, _ = body.rotary_emb(hidden, torch.full((1, 1), PROBED, device=model.device), *kinds)
        rotated = cos.shape[-1]
        return cls(rotated, not torch.equal(cos[..., : rotated // 2], cos[..., rotated // 2 :]))

    def by_halves(self, angles: Tensor) -> Tensor:
        """Return cosines or sines [..., rotated] of the pairs in the order of the kernels."""
        each = angles[..., ::2] if self.doubled else angles[..., : self.rotated // 2]
        return torch.cat([each, each], dim=-1)

    def reordered(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], width: int, head_dim: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias of an attention's input with queries and keys in the order of the kernels.

        Args: weights, biases of queries, keys and values, of one layer or of three; width of all queries together.
        """
        weight = torch.cat([*weights])
        turned = width + (len(weight) - width) // 2  # values are as wide as keys
        in_head = torch.arange(head_dim)
        in_head[: self.rotated] = in_head[: self.rotated].view(-1, 2).T.flatten()
        order = torch.arange(len(weight))
        order[:turned] = (order[:turned].view(-1, head_dim)[:, in_head]).flatten()
        order = order.to(weight.device)
        added = [None if bias is None else bias.detach() for bias in biases]
        if all(bias is None for bias in added):
            return weight[order], None
        whole = [
            weight.new_zeros(len(each)) if bias is None else bias for each, bias in zip(weights, added, strict=True)
        ]
        return weight[order], torch.cat(whole)[order]
