"""A mixture of experts: every expert multiplies the rows that were sent to it, together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from posttrain.backends.rollout.native.packed_products import Product

Rows = Callable[[Tensor], Tensor]


def mixture(
    *,
    router: nn.Module,
    gate_up: Sequence[Product],
    activation: Rows,
    down: Sequence[Product],
    fewest_rows: int,
    shared: Rows | None = None,
    shared_gate: nn.Module | None = None,
) -> Rows:
    """Return the function [rows, hidden] -> [rows, hidden] of a mixture of experts.

    Args: router, the model's own, returns logits, weights [rows, chosen] and numbers of the chosen experts [rows, chosen];
        gate_up, down: products of each expert, of ``fewest_rows`` at least; shared: an expert for all rows, times the sigmoid of
        its gate where it has one.
    """

    def mixed(rows: Tensor) -> Tensor:
        _, weights, chosen = router(rows)
        each = chosen.shape[1]
        by_expert = chosen.flatten().argsort(stable=True)  # entry row * chosen + n, by its expert
        counts = torch.bincount(chosen.flatten(), minlength=len(down)).tolist()
        found = rows.new_empty(len(by_expert), rows.shape[1])
        for expert, places in enumerate(by_expert.split(counts)):
            count = counts[expert]
            if count:
                filled = torch.cat([places, places[:1].expand(max(0, fewest_rows - count))])
                found[places] = down[expert](activation(gate_up[expert](rows[filled // each])))[:count]
        # Summed in float32 and rounded once
        output = (found.view(len(rows), each, -1) * weights[..., None].float()).sum(dim=1).to(rows.dtype)
        if shared is not None:
            common = shared(rows)
            output += common if shared_gate is None else torch.sigmoid(shared_gate(rows)) * common
        return output

    return mixed
