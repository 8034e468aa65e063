"""Rows of a batch, side by side in one long row without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.records.batches import SequenceBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedSequences:
    """N tokens of B sequences, M of which are response tokens to be scored."""

    token_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, from 0 in every sequence
    lengths: tuple[int, ...]  # tokens of each of the B sequences
    predicting: Tensor  # [M] int64, position (in N) whose next token is the scored one
    targets: Tensor  # [M] int64, the scored tokens
    response_mask: Tensor  # [B, T] bool, where the M scores belong, row by row

    def unpack(self, values: Tensor) -> Tensor:
        """[M] values to [B, T], 0 elsewhere, carrying gradient."""
        out = torch.zeros(self.response_mask.shape, dtype=values.dtype, device=values.device)
        return out.masked_scatter(self.response_mask, values)


def pack(batch: SequenceBatch, device: torch.device | str = "cpu") -> PackedSequences:
    """Pack each row's prompt and response; padding on either side is dropped, tokens between scored ones are kept."""
    width = batch.prompt_width
    starts = width - batch.prompt_lengths
    ends = width + batch.response_lengths
    column = torch.arange(batch.tokens.shape[1])
    kept = (column >= starts[:, None]) & (column < ends[:, None])  # [B, P + T]
    lengths = ends - starts
    offsets = torch.cumsum(lengths, 0) - lengths
    # Where a response token stands in the packed row; the token before it predicts it.
    packed_position = offsets[:, None] + column - starts[:, None]
    scored = batch.response_mask
    return PackedSequences(
        token_ids=batch.tokens[kept].to(device),
        position_ids=(column.expand_as(kept) - starts[:, None])[kept].to(device),
        lengths=tuple(lengths.tolist()),
        predicting=(packed_position[:, width:][scored] - 1).to(device),
        targets=batch.tokens[:, width:][scored].to(device),
        response_mask=scored.to(device),
    )
