"""Attention over prompts that are held once and responses of their own equals plain attention over whole sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.backends.rollout.native import cache as cache_module
from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.slots import TiledSlots
from posttrain.models.attention_settings import AttentionSettings

KV, SHARED, DIM = 2, 3, 8  # key/value heads, query heads for each, width


def new_cache(layers: Iterable[int] = (0,)) -> KeyValueCache:
    return KeyValueCache(
        layers=layers, kv_heads=KV, head_dim=DIM, dtype=torch.float64, device=torch.device("cpu"), most_slots=20
    )


def plain(query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """query [heads, DIM] at the last of the positions; keys, values [positions, KV, DIM] -> [heads, DIM]"""
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    keys, values = (x.repeat_interleave(SHARED, dim=1) for x in (keys, values))
    weights = (torch.einsum("hd,nhd->hn", query, keys) / math.sqrt(DIM)).softmax(dim=1)
    return torch.einsum("hn,nhd->hd", weights, values)


@given(
    prompt_lens=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 35)), min_size=1, max_size=9),
    window=st.sampled_from([None, 1, 5, 30]),
    few=st.sampled_from([0, cache_module.FEW_NUMBERS]),
)
def test_attention_of_ragged_groups_equals_plain_attention(
    prompt_lens: list[int], rows: list[tuple[int, int]], window: int | None, few: int
) -> None:
    """Any prompts, any number of samples of each in any order, at any place in their responses, in a cache that grows
    with them and is written in either way."""
    torch.manual_seed(len(rows))
    rows = [(prompt % len(prompt_lens), cached) for prompt, cached in rows]
    cache = new_cache()
    prompts = [torch.randn(2, length, KV, DIM, dtype=torch.float64) for length in prompt_lens]
    ends = torch.tensor(prompt_lens).cumsum(0).tolist()
    cache.prefilling([(end - n, end, slot, 0) for slot, (n, end) in enumerate(zip(prompt_lens, ends, strict=True))])
    packed = torch.cat(prompts, dim=1).transpose(1, 2)  # [2, KV, N, DIM]
    cache.update(packed[:1], packed[1:], 0)
    longest = max(cached for _, cached in rows)
    responses = torch.randn(2, len(rows), longest + 1, KV, DIM, dtype=torch.float64)
    for place in range(longest + 1):  # rows that are shorter write their own last place again and again
        places = [min(place, cached) for _, cached in rows]
        cache.decoding([prompt for prompt, _ in rows], [prompt_lens[prompt] for prompt, _ in rows], places)
        key, value = (responses[part, range(len(rows)), places] for part in (0, 1))
        with mock.patch.object(cache_module, "FEW_NUMBERS", few):
            cache.write(0, key, value)
    query = torch.randn(len(rows), KV * SHARED, DIM, dtype=torch.float64)
    got = cache.attend(0, query, AttentionSettings(1 / math.sqrt(DIM), window))
    for row, (prompt, cached) in enumerate(rows):
        keys, values = (torch.cat([prompts[prompt][part], responses[part, row, : cached + 1]]) for part in (0, 1))
        # The scores and weights are float32 in between.
        torch.testing.assert_close(got[row], plain(query[row], keys, values, window), rtol=1e-5, atol=1e-5)


def test_two_samples_of_one_prompt_by_hand() -> None:
    """Keys 0, so that weights are equal over what is seen: prompt values 3 and 6; responses 12, and 30 then 9."""
    cache = new_cache()
    zeros = torch.zeros(1, KV, 2, DIM, dtype=torch.float64)
    cache.prefilling([(0, 2, 0, 0)])
    cache.update(zeros, zeros + torch.tensor([3.0, 6.0])[:, None], 0)
    nothing = torch.zeros(2, KV, DIM, dtype=torch.float64)
    query = torch.randn(2, KV * SHARED, DIM, dtype=torch.float64)
    cache.decoding([0, 0], [2, 2], [0, 0])
    cache.write(0, nothing, nothing + torch.tensor([12.0, 30.0])[:, None, None])
    assert cache.attend(0, query, AttentionSettings(1.0))[:, 0, 0].tolist() == pytest.approx(
        [(3 + 6 + 12) / 3, (3 + 6 + 30) / 3]
    )
    cache.decoding([0, 0], [2, 2], [1, 1])
    cache.write(0, nothing, nothing + torch.tensor([0.0, 9.0])[:, None, None])
    assert cache.attend(0, query, AttentionSettings(1.0))[:, 0, 0].tolist() == pytest.approx(
        [21 / 4, (3 + 6 + 30 + 9) / 4]
    )
    assert cache.attend(0, query, AttentionSettings(1.0, window=2))[1, 0, 0].item() == pytest.approx((30 + 9) / 2)
    cache.responses.move(1, 0, 2)
    cache.decoding([0], [2], [1])
    assert cache.attend(0, query[:1], AttentionSettings(1.0))[0, 0, 0].item() == pytest.approx(48 / 4)


def test_room_of_a_long_response_is_given_up_after_it() -> None:
    """100 tokens take room for 112; when 80 are needed that stays (a quarter may be unused: 84), with 50 it shrinks to 64, and
    what is in it stays the same."""
    cache = new_cache()
    cache.prefilling([(0, 1, 0, 0)])
    nothing = torch.zeros(1, KV, 1, DIM, dtype=torch.float64)
    cache.update(nothing, nothing, 0)
    key = torch.randn(1, KV, DIM, dtype=torch.float64)
    for cached, room in ((49, 64), (99, 112), (83, 112), (82, 96), (49, 64), (47, 64)):
        cache.decoding([0], [1], [cached])
        assert cache.responses.length == room
        if (cached, room) == (49, 64):
            cache.write(0, key, 2 * key)
    assert torch.equal(cache.responses.keys[0][0, :, :, 49], key[0])
    assert torch.equal(cache.responses.values[0][0, :, 49], 2 * key[0])


def test_tiled_slots_by_hand() -> None:
    """Two tokens side by side, tiles of 16: of token 17 (second tile, second key), number 2 is in the second pair of numbers,
    whose 16 keys come after 32 numbers, so at 32 + 1 * 2; its value is in pair 8, number 2 at 2 * 2 + 1. It stays when slots
    grow and move."""
    slots = TiledSlots(
        layers=[0], kv_heads=1, head_dim=3, dtype=torch.float32, device=torch.device("cpu"), step=2
    )  # fmt: skip
    slots.make_room(2, 20, longest=200)
    assert (slots.length, slots.keys[0].shape, slots.values[0].shape) == (64, (2, 1, 4, 64), (2, 1, 32, 6))
    for place, number in ((2, 5.0), (3, 6.0), (34, 7.0)):
        slots.keys[0][1, 0, 1, place] = number
    for place, number in ((1, 8.0), (3, 9.0), (5, 10.0)):
        slots.values[0][1, 0, 8, place] = number

    def check(slot: int) -> None:
        keys, values = slots.read(0, slot, 18)
        assert (keys.shape, values.shape) == ((1, 3, 18), (1, 18, 3))
        assert (keys[0, :, 17].tolist(), values[0, 17].tolist()) == ([5.0, 6.0, 7.0], [8.0, 9.0, 10.0])

    check(1)
    slots.make_room(3, 65, longest=200)
    assert slots.length == 96
    check(1)
    slots.move(1, 0, 18)
    check(0)
    slots.trim(18)
    assert slots.length == 96
