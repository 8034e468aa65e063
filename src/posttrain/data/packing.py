"""Packing of a batch: its rows side by side in one long row without padding; shared prompts are stored once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from posttrain.records.allowed_tokens import from_text
from posttrain.records.batches import SequenceBatch
from posttrain.records.images import PlacedImages, PromptImages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnDistributions:
    """The distributions of k scored tokens that were not drawn from the run's."""

    places: Tensor  # [k] int64, among the M scores, ascending
    temperatures: Tensor  # [k] float32
    which: Tensor  # [k] int64, row of ``allowed``; -1: no token is excluded
    allowed: Tensor  # [sets, vocabulary or up to 7 more] bool

    def at(self, places: Tensor) -> OwnDistributions:
        """Return those at some of the M scores, whose places are then counted among ``places``."""
        number, chosen = (places[:, None] == self.places).nonzero(as_tuple=True)
        return OwnDistributions(
            places=number, temperatures=self.temperatures[chosen], which=self.which[chosen], allowed=self.allowed
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedSequences:
    """B rows packed into N tokens, M of which are response tokens to be scored.

    The long row holds group after group: a shared prompt and then its responses, or one whole sequence.
    """

    token_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, from 0 in every prompt; a response continues the positions of its prompt
    # Tokens of the prompt and of each response; no responses: a whole sequence
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    predicting: Tensor  # [M] int64, position (in N) whose next token is the scored one
    targets: Tensor  # [M] int64, the scored tokens
    response_mask: Tensor  # [B, T] bool, the places of the M scores, row by row
    rows: Tensor  # [N] int64, the row that a token is a response of; -1: a prompt's token, or padding
    experts: Tensor | None = None  # [N, layers, chosen] int16, of the batch; None: it has none
    images: tuple[PlacedImages, ...] = ()  # of the rows that have any; position_ids still count text only
    own: OwnDistributions | None = None  # of some of the scored tokens; None: all have the run's

    def of_responses(self, rows: Tensor) -> Tensor:
        """Return the tokens of the responses of some rows, [B] bool to [N] bool: each is in exactly one micro-batch, as prompts
        are not."""
        return (self.rows >= 0) & rows.to(self.rows.device)[self.rows.clamp(min=0)]

    def unpack(self, values: Tensor) -> Tensor:
        """Scatter [M] values to [B, T], 0 elsewhere, carrying gradient."""
        out = torch.zeros(self.response_mask.shape, dtype=values.dtype, device=values.device)
        return out.masked_scatter(self.response_mask, values)

    def unpack_several(self, values: Tensor) -> Tensor:
        """Scatter [M, ...] values to [B, T, ...], 0 elsewhere. No gradient."""
        out = values.new_zeros(*self.response_mask.shape, *values.shape[1:])
        out[self.response_mask] = values
        return out


def pack(
    batch: SequenceBatch,
    device: torch.device | str = "cpu",
    *,
    share_prompts: bool = True,
    padded: bool = False,
) -> PackedSequences:
    """Pack each row's prompt and response; padding on either side is dropped, unscored tokens between scored ones are kept.

    With ``share_prompts``, neighbouring rows of one group with the same prompt store it once, so that the model reads it
    once: the same numbers for less work. With ``padded`` the model reads the same input as without packing: every row with its
    own prompt, right-padded to the longest row; no response token attends to padding.
    """
    width = batch.prompt_width
    prompts: list[int] = batch.prompt_lengths.tolist()
    responses: list[int] = batch.response_lengths.tolist()
    tokens: list[Tensor] = []
    experts: list[Tensor] = []
    positions: list[Tensor] = []
    row_of: list[Tensor] = []
    groups: list[tuple[int, tuple[int, ...]]] = []
    prompt_ends, response_starts = [0] * len(batch), [0] * len(batch)  # in the packed row
    start = 0
    images: list[PlacedImages] = []
    longest = max(map(sum, zip(prompts, responses, strict=True)), default=0)
    alone = padded or not share_prompts
    for rows in ([row] for row in range(len(batch))) if alone else rows_sharing_a_prompt(batch):
        prompt = prompts[rows[0]]
        tokens.append(batch.tokens[rows[0], width - prompt : width])
        if batch.experts is not None:
            experts.append(batch.experts[rows[0], width - prompt : width])
        positions.append(torch.arange(prompt))
        row_of.append(torch.full((prompt,), -1))
        prompt_end = start = start + prompt
        for row in rows:
            tokens.append(batch.tokens[row, width : width + responses[row]])
            if batch.experts is not None:
                experts.append(batch.experts[row, width : width + responses[row]])
            row_of.append(torch.full((responses[row],), row))
            positions.append(torch.arange(prompt, prompt + responses[row]))
            prompt_ends[row], response_starts[row] = prompt_end, start
            start += responses[row]
        of_prompt = batch.images[rows[0]] if batch.images else None
        if of_prompt is not None:
            begin = prompt_end - prompt
            read = start - begin if of_prompt.beyond_prompt else prompt
            images.append(PlacedImages(images=of_prompt, start=begin, prompt=read, end=start))
        if padded:
            used = prompt + responses[rows[0]]
            tokens.append(batch.tokens.new_zeros(longest - used))
            if batch.experts is not None:
                experts.append(batch.experts.new_full((longest - used, *batch.experts.shape[2:]), -1))
            row_of.append(torch.full((longest - used,), -1))
            positions.append(torch.arange(used, longest))
            groups.append((longest, ()))
            start += longest - used
            continue
        shared = len(rows) > 1
        groups.append((prompt, tuple(responses[row] for row in rows)) if shared else (prompt + responses[rows[0]], ()))
    column = torch.arange(batch.response_mask.shape[1])
    # The previous token predicts a response token: the one before it in the response, or the last one of the prompt.
    predicting = torch.tensor(response_starts)[:, None] + column - 1
    predicting[:, 0] = torch.tensor(prompt_ends) - 1
    scored = batch.response_mask
    return PackedSequences(
        token_ids=torch.cat(tokens).to(device),
        position_ids=torch.cat(positions).to(device),
        groups=tuple(groups),
        predicting=predicting[scored].to(device),
        targets=batch.tokens[:, width:][scored].to(device),
        response_mask=scored.to(device),
        rows=torch.cat(row_of).to(device),
        experts=torch.cat(experts).to(device) if experts else None,
        images=tuple(images),
        own=own_distributions(batch, device) if batch.own_draws else None,
    )


def own_distributions(batch: SequenceBatch, device: torch.device | str) -> OwnDistributions | None:
    """Return the distributions of the scored tokens that have one of their own; None where none has."""
    mask = batch.response_mask
    numbers = torch.full(mask.shape, -1)
    numbers[mask] = torch.arange(int(mask.sum()))
    sets: dict[str, int] = {}
    places: list[int] = []
    temperatures: list[float] = []
    which: list[int] = []
    for row, draws in enumerate(batch.own_draws):
        for each in draws:
            columns = [at for at in range(each.first_token, each.end) if numbers[row, at] >= 0]
            places += numbers[row, columns].tolist()
            temperatures += [each.temperature] * len(columns)
            known = [sets.setdefault(text, len(sets)) for text in each.allowed]
            which += [known[each.which[at - each.first_token]] if known else -1 for at in columns]
    if not places:
        return None
    found = [torch.from_numpy(from_text(text)) for text in sets]
    return OwnDistributions(
        places=torch.tensor(places, device=device),
        temperatures=torch.tensor(temperatures, device=device),
        which=torch.tensor(which, device=device),
        allowed=(torch.stack(found) if found else torch.ones(1, 1, dtype=torch.bool)).to(device),
    )


def unpack_tokens(values: Tensor, batch: SequenceBatch, *, share_prompts: bool, padded: bool) -> Tensor:
    """Scatter values of a packed batch's tokens, [N, ...], to [B, P + T, ...] on the CPU, -1 where a row has no token. The values
    of a shared prompt go to each of its rows.

    Args: values of further tokens, behind these, are dropped; share_prompts and padded as in the call of ``pack`` that the values
        come from.
    """
    whole = batch.tokens.shape
    numbered = replace(batch, experts=torch.arange(whole.numel()).view(*whole, 1, 1))
    places = pack(numbered, share_prompts=share_prompts, padded=padded).experts
    assert places is not None, "the batch has values of tokens"
    places = places.flatten()
    out = values.new_full((whole.numel(), *values.shape[1:]), -1, device="cpu")
    out[places[places >= 0]] = values.cpu()[: len(places)][places >= 0]
    out = out.view(*whole, *values.shape[1:])
    if share_prompts and not padded:
        for first, *others in rows_sharing_a_prompt(batch):
            if others:
                out[others, : batch.prompt_width] = out[first, : batch.prompt_width].clone()
    return out


def rows_sharing_a_prompt(batch: SequenceBatch) -> Iterator[list[int]]:
    """Yield row numbers, in order, in runs of one group and one prompt. A row without a response is its own run."""
    if not len(batch):
        return
    prompts, has_response = batch.tokens[:, : batch.prompt_width], batch.response_lengths > 0
    # [B - 1]: the row shares the prompt of the one before it
    shares = (
        (batch.group_index[1:] == batch.group_index[:-1])
        & (batch.prompt_lengths[1:] == batch.prompt_lengths[:-1])
        & has_response[1:]
        & has_response[:-1]
        & (prompts[1:] == prompts[:-1]).all(dim=1)
    )
    if batch.images:
        shares &= torch.tensor([_share_images(*pair) for pair in pairwise(batch.images)], dtype=torch.bool)
    starts = [0, *((~shares).nonzero().squeeze(1) + 1).tolist(), len(batch)]
    for start, end in pairwise(starts):
        yield list(range(start, end))


def _share_images(one: PromptImages | None, other: PromptImages | None) -> bool:
    """Return True for the same images, all of them in the prompt."""
    if one is None or other is None:
        return one is other
    return one.content_hash == other.content_hash and not one.beyond_prompt and not other.beyond_prompt
