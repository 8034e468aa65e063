"""Prompts as whole numbers beside the cache: what is rounded when, and how near to the numbers it is."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.kernels import Kernels, Turn, load_kernels
from posttrain.backends.rollout.native.rounded_prompts import RoundingKernel
from posttrain.models.attention_settings import AttentionSettings

SIZES: dict[str, Any] = {"kv_heads": 2, "head_dim": 32, "dtype": torch.bfloat16, "device": torch.device("cpu")}


class Recorded:
    """Takes the place of the kernel: what it was asked to round since it was asked for."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []

    def __call__(self, parts: Tensor, keys: Tensor, values: Tensor, addresses: dict[str, int]) -> None:
        self.parts += parts.T.tolist()

    def new(self) -> list[list[int]]:
        parts, self.parts = self.parts, []
        return parts


def test_a_prompt_is_rounded_once_until_its_slot_is_written_again() -> None:
    rounded = Recorded()
    cache = KeyValueCache(layers=[0], **SIZES, rounding=cast(RoundingKernel, rounded))
    cache.prefilling([(0, 40, 0, 0), (40, 57, 1, 0), (57, 90, 2, 0)])
    rows = [0, 1, 0], [40, 17, 40]
    cache.decoding(*rows, [0, 0, 0])
    assert rounded.new() == [[0, 0, 40], [1, 0, 17]]  # not slot 2, which nothing is decoded of
    cache.decoding(*rows, [1, 1, 1])
    assert rounded.new() == []
    cache.prefilling([(0, 5, 0, 35)])  # after 35 tokens that the slot holds: from the 16 that token 35 is one of
    cache.decoding(*rows, [2, 2, 2])
    assert rounded.new() == [[0, 32, 40]]
    cache.prefilling([(0, 3, 1, 17)], copies=[(0, 1, 17)])
    cache.decoding([0, 1], [40, 20], [3, 3])
    assert rounded.new() == [[1, 0, 20]]
    cache.move_prompt(2, 1, 33)
    cache.decoding([0, 1], [40, 33], [4, 4])
    assert rounded.new() == [[1, 0, 33]]
    cache.put(cache.take(0, 40, 0, 0), 1, 40)
    cache.decoding([0, 1], [40, 40], [5, 5])
    assert rounded.new() == [[1, 0, 40]]
    cache.prefilling([(0, 300, 3, 0)])  # for which all slots become longer
    cache.decoding([0, 3], [40, 300], [6, 6])
    assert rounded.new() == [[0, 0, 40], [3, 0, 300]]


def kernels_that_round() -> Kernels:
    kernels = load_kernels(torch.bfloat16)
    assert isinstance(kernels, Kernels), kernels
    if not kernels.rounding.used:
        pytest.skip("this processor multiplies bfloat16 numbers as fast")
    return kernels


@pytest.mark.parametrize(("prompt", "samples"), [(37, 1), (700, 3), (1030, 8)])
def test_attention_over_rounded_prompts_is_nearer_to_exact_than_torch(prompt: int, samples: int) -> None:
    """Keys with large biases in a few numbers, as Qwen2's; the results of both are rounded to bfloat16."""
    kernels = kernels_that_round()
    torch.manual_seed(prompt)
    cache = KeyValueCache(layers=[0], **SIZES, tile_step=kernels.tile_step, rounding=kernels.rounding)
    cache.prefilling([(0, prompt, 0, 0)])
    keys, values = torch.randn(2, 2, prompt, 32)
    keys[:, :, 3] += 30
    keys, values = keys.bfloat16(), values.bfloat16()
    cache.prompts.keys[0][0, :, :, :prompt], cache.prompts.values[0][0, :, :prompt] = keys.mT, values
    cache.decoding([0] * samples, [prompt] * samples, [0] * samples)
    query_key, value = torch.randn(samples, 6 + 2, 32).bfloat16(), torch.randn(samples, 2, 32).bfloat16()
    turn = Turn(torch.ones(samples, 1, 32), torch.zeros(samples, 1, 32), 0)
    found = kernels.attend(cache, 0, query_key, value, turn, AttentionSettings(0.2))

    def by_torch(dtype: torch.dtype) -> Tensor:
        query, own = query_key.to(dtype).view(samples, 8, 32).split([6, 2], dim=1)
        all_keys = torch.cat([keys.to(dtype).expand(samples, -1, -1, -1), own[:, :, None]], dim=2)
        all_values = torch.cat([values.to(dtype).expand(samples, -1, -1, -1), value.to(dtype)[:, :, None]], dim=2)
        scores = query.reshape(samples, 2, 3, 32) @ all_keys.mT * 0.2
        return (scores.softmax(dim=-1) @ all_values).reshape(samples, -1)

    exact, plain = by_torch(torch.float64), by_torch(torch.bfloat16)
    distance, of_torch = ((each.double() - exact).norm() for each in (found, plain))
    of_rounding = (exact.bfloat16().double() - exact).norm()
    assert distance <= 1.1 * of_rounding < 0.8 * of_torch
