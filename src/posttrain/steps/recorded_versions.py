"""Versions of the weights that sampled each token, from the spans of the trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from posttrain.records.samples import SampleRow


def token_versions(rows: Sequence[SampleRow], mask: Tensor) -> Tensor:
    """The versions of the weights that sampled each token, [B, T] int64; in observations and behind the end that of the span."""
    versions = torch.zeros(mask.shape, dtype=torch.int64)
    for index, row in enumerate(rows):
        starts = [span.first_token for span in row.sample.spans] + [mask.shape[1]]
        for span, (start, end) in zip(row.sample.spans, pairwise(starts), strict=True):
            versions[index, start:end] = span.version
    return versions
