"""Rows of a batch without their padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batches import sequence_batch
from posttrain.data.packing import pack
from posttrain.records.batches import SequenceBatch
from posttrain.records.images import PromptImages


def make_batch(
    rows: list[tuple[list[int], list[int]]], *, groups: list[int] | None = None, masked: tuple[int, int] | None = None
) -> SequenceBatch:
    """Rows of (prompt, response); padding is 99. ``masked``: a response token (row, position) nobody sampled."""
    width = max(len(prompt) for prompt, _ in rows)
    length = max(len(response) for _, response in rows)
    tokens = torch.full((len(rows), width + length), 99)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, (prompt, response) in enumerate(rows):
        tokens[row, width - len(prompt) : width] = torch.tensor(prompt)
        tokens[row, width : width + len(response)] = torch.tensor(response)
        mask[row, : len(response)] = True
    if masked:
        mask[masked] = False
    return sequence_batch(
        tokens=tokens,
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in rows]),
        response_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        group_index=torch.tensor(groups or list(range(len(rows)))),
        sample_ids=tuple(str(row) for row in range(len(rows))),
    )


ROWS = [([10, 11, 12], [1, 2]), ([20], [3, 4, 5]), ([30, 31], [6])]


def test_whole_sequences_side_by_side() -> None:
    packed = pack(make_batch(ROWS))
    assert packed.token_ids.tolist() == [10, 11, 12, 1, 2, 20, 3, 4, 5, 30, 31, 6]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert packed.groups == ((5, ()), (4, ()), (3, ()))
    assert packed.targets.tolist() == [1, 2, 3, 4, 5, 6]
    # 1 is predicted by 12, 2 by 1; 3 by 20, 4 by 3, 5 by 4; 6 by 31.
    assert packed.token_ids[packed.predicting].tolist() == [12, 1, 20, 3, 4, 31]


def test_shared_prompt_stands_once_and_predicts_every_first_token() -> None:
    batch = make_batch([([10, 11], [1, 2]), ([10, 11], [3]), ([20], [4]), ([20], [5, 6])], groups=[0, 0, 1, 1])
    packed = pack(batch)
    assert packed.token_ids.tolist() == [10, 11, 1, 2, 3, 20, 4, 5, 6]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1, 1, 2]
    assert packed.groups == ((2, (2, 1)), (1, (1, 2)))
    assert packed.token_ids[packed.predicting].tolist() == [11, 1, 11, 20, 20, 5]
    assert packed.targets.tolist() == [1, 2, 3, 4, 5, 6]
    apart = pack(batch, share_prompts=False)
    assert apart.groups == ((4, ()), (3, ()), (2, ()), (3, ()))
    assert apart.token_ids[apart.predicting].tolist() == packed.token_ids[packed.predicting].tolist()


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        ([([1, 2], [3]), ([1, 2], [3])], [0, 1]),  # two groups of one prompt
        ([([1, 2], [3]), ([1, 3], [3])], [0, 0]),
        ([([1, 2], [3]), ([2], [3])], [0, 0]),  # one prompt ends like the other
        ([([1, 2], [3]), ([7], [3]), ([1, 2], [3])], [0, 1, 0]),  # not neighbours
    ],
)
def test_only_neighbours_of_one_group_and_one_prompt_share(
    rows: list[tuple[list[int], list[int]]], groups: list[int]
) -> None:
    assert all(responses == () for _, responses in pack(make_batch(rows, groups=groups)).groups)


def test_images_in_answers_of_an_environment_count_as_prompt() -> None:
    """Two responses to one prompt whose second image was shown in between: neither shares its prompt."""
    of = [PromptImages(files=(b"a", b"b"), features={}, content_hash="ab", in_prompt=number) for number in (1, 2)]
    batch = make_batch([([1, 2], [3, 4]), ([1, 2], [5])], groups=[0, 0])
    beyond = pack(replace(batch, images=(of[0], of[0])))
    assert [(each.start, each.prompt, each.end) for each in beyond.images] == [(0, 4, 4), (4, 3, 7)]
    within = pack(replace(batch, images=(of[1], of[1])))
    assert [(each.start, each.prompt, each.end) for each in within.images] == [(0, 2, 5)]


def test_token_between_scored_ones_is_read_but_not_scored() -> None:
    """A tool's answer inside a response: the model reads it, and the token after it is predicted by it."""
    packed = pack(make_batch([([10], [1, 2, 3])], masked=(0, 1)))
    assert packed.token_ids.tolist() == [10, 1, 2, 3]
    assert packed.targets.tolist() == [1, 3]
    assert packed.token_ids[packed.predicting].tolist() == [10, 2]


def test_unpack_puts_scores_back_row_by_row_with_their_gradient() -> None:
    packed = pack(make_batch(ROWS))
    values = torch.arange(1.0, 7.0, requires_grad=True)
    unpacked = packed.unpack(values)
    assert unpacked.tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
    (unpacked * torch.tensor([[1.0, 2, 100], [3, 4, 5], [6, 100, 100]])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1, 2, 3, 4, 5, 6]


def test_padded_rows_are_filled_up_behind_and_share_nothing() -> None:
    rows = [([1, 2], [3]), ([1, 2], [4, 5, 6]), ([7], [8])]  # 3, 5 and 2 tokens
    packed = pack(make_batch(rows, groups=[0, 0, 1]), padded=True)
    assert packed.groups == ((5, ()), (5, ()), (5, ()))
    assert packed.token_ids.tolist() == [1, 2, 3, 0, 0, 1, 2, 4, 5, 6, 7, 8, 0, 0, 0]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4] * 3
    assert packed.targets.tolist() == [3, 4, 5, 6, 8]
    assert packed.predicting.tolist() == [1, 6, 7, 8, 10]
