"""The experts that the sampler chose for every token, as a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.records.samples import SampleRow


def recorded_experts(rows: Sequence[SampleRow], prompt_width: int, response_width: int) -> Tensor | None:
    """The experts of every token, [B, P + T, layers, chosen] int16, -1 where none were recorded; None where no row has any."""
    shape = next((row.sample.experts.shape[1:] for row in rows if row.sample.experts is not None), None)
    if shape is None:
        return None
    found = torch.full((len(rows), prompt_width + response_width, *shape), -1, dtype=torch.int16)
    for index, row in enumerate(rows):
        experts = row.sample.experts
        if experts is not None:
            start = prompt_width - len(row.prompt)
            found[index, start : start + len(experts)] = torch.from_numpy(experts)
    return found
