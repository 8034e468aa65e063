"""What holds for every advantage estimator, on any batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.registry import ADVANTAGES

NAMES = ADVANTAGES.names()
OF_PAIRS = ADVANTAGES.stating("pairs")  # which row is whose neighbour is a part of what they compute
WITHOUT_PAIRS = [name for name in NAMES if name not in OF_PAIRS]
PER_ROW = (
    "valid",
    "group_index",
    "trajectory_index",
    "step_index",
    "state_index",
    "rewards",
    "greedy_rewards",
    "step_rewards",
    "episode_rewards",
    "turn_penalties",
)
REWARDS = PER_ROW[5:]
MASKS = ("response_mask", "turn_begins")
PER_TOKEN = (*MASKS, "token_rewards", "values", "old_logprobs", "ref_logprobs", "sum_pi_squared", "process_rewards")
GIVEN = {"gamma": 0.9, "gae_lambda": 0.8, "step_gamma": 0.7, "step_weight": 0.5}


@dataclass(frozen=True)
class Inputs:
    tensors: dict[str, Tensor]

    def rows(self, index: Tensor) -> Inputs:
        return Inputs({name: tensor[index] for name, tensor in self.tensors.items()})

    def with_(self, **changes: Tensor) -> Inputs:
        return replace(self, tensors=self.tensors | changes)


@st.composite
def batches(draw: st.DrawFn) -> Inputs:
    """Up to 7 rows in up to 3 groups, up to 5 tokens, holes and empty rows and invalid rows included."""
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(rows, width, generator=generator) < 0.7
    return Inputs(
        {
            "valid": torch.rand(rows, generator=generator) < 0.8,
            "group_index": torch.randint(0, 3, (rows,), generator=generator),
            "rewards": draw(st.sampled_from([random(rows), random(rows).sign(), torch.ones(rows).double()])),
            "greedy_rewards": random(rows),
            "trajectory_index": torch.randint(0, 3, (rows,), generator=generator),
            "step_index": torch.randperm(rows, generator=generator),
            "state_index": torch.randint(0, 2, (rows,), generator=generator),
            "step_rewards": random(rows),
            "episode_rewards": random(rows),
            "turn_penalties": random(rows),
            "response_mask": mask,
            "turn_begins": mask & (torch.rand(rows, width, generator=generator) < 0.4),
            "token_rewards": torch.where(mask, random(rows, width), 0.0),
            "values": random(rows, width),
            "process_rewards": random(rows, width),
            "old_logprobs": -random(rows, width).abs(),
            "ref_logprobs": -random(rows, width).abs(),
            "sum_pi_squared": torch.rand(rows, width, generator=generator, dtype=torch.float64),
        }
    )


def estimate(name: str, inputs: Inputs, **given: Any) -> Tensor:
    """Advantages [B, T]; with a critic, [B, 2T]: the returns beside them."""
    estimator = ADVANTAGES.get(name)
    available: dict[str, Any] = inputs.tensors | {
        "reward_terms": {
            "first": inputs.tensors["rewards"],
            "second": inputs.tensors["greedy_rewards"],
        }
    }
    settings = ADVANTAGES.settings(name)
    needed = [available[tensor] for tensor in ADVANTAGES.inputs(name)]
    given = {key: value for key, value in (GIVEN | given).items() if key in settings}
    given |= {key: each.example() for key, each in settings.items() if each.required and key not in given}
    result = estimator(*needed, **given)
    return torch.cat(result, dim=1) if isinstance(result, tuple) else result


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(inputs=batches(), garbage=st.sampled_from([math.nan, math.inf, 1e4]))
def test_garbage_behind_the_mask_changes_nothing(name: str, inputs: Inputs, garbage: float) -> None:
    clean = estimate(name, inputs)
    assert clean.isfinite().all()
    kept = inputs.tensors["response_mask"] & inputs.tensors["valid"][:, None]
    per_token = [name for name in PER_TOKEN if name not in MASKS]
    dirty = {key: torch.where(kept, inputs.tensors[key], garbage) for key in per_token}
    dirty |= {key: torch.where(inputs.tensors["valid"], inputs.tensors[key], garbage) for key in REWARDS}
    result = estimate(name, inputs.with_(**dirty))
    assert torch.equal(result, clean)
    assert (result[~kept.repeat(1, result.shape[1] // kept.shape[1])] == 0).all()


@pytest.mark.parametrize("name", WITHOUT_PAIRS)
@settings(max_examples=25)
@given(inputs=batches(), seed=st.integers(0, 100))
def test_row_order_does_not_matter(name: str, inputs: Inputs, seed: int) -> None:
    order = torch.randperm(len(inputs.tensors["valid"]), generator=torch.Generator().manual_seed(seed))
    same(estimate(name, inputs.rows(order)), estimate(name, inputs)[order])


@pytest.mark.parametrize("name", OF_PAIRS)
@settings(max_examples=25)
@given(inputs=batches(), seed=st.integers(0, 100))
def test_the_order_of_pairs_and_within_them_does_not_matter(name: str, inputs: Inputs, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = len(inputs.tensors["valid"])
    pairs = torch.arange(rows - rows % 2).view(-1, 2)[torch.randperm(rows // 2, generator=generator)]
    order = torch.cat([pairs[:, torch.randperm(2, generator=generator)].flatten(), torch.arange(rows - rows % 2, rows)])
    same(estimate(name, inputs.rows(order)), estimate(name, inputs)[order])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(inputs=batches())
def test_group_numbers_are_only_names(name: str, inputs: Inputs) -> None:
    renamed = inputs.with_(group_index=1000 - 7 * inputs.tensors["group_index"])
    same(estimate(name, renamed), estimate(name, inputs))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(inputs=batches(), columns=st.integers(1, 3))
def test_more_padding_changes_nothing(name: str, inputs: Inputs, columns: int) -> None:
    def pad(tensor: Tensor) -> Tensor:
        filler = False if tensor.dtype == torch.bool else math.nan
        return torch.cat([tensor, torch.full((len(tensor), columns), filler, dtype=tensor.dtype)], dim=1)

    padded = inputs.with_(**{key: pad(inputs.tensors[key]) for key in PER_TOKEN})
    width = inputs.tensors["response_mask"].shape[1]
    plain, wide = estimate(name, inputs), estimate(name, padded)
    for part, wide_part in zip(plain.split(width, dim=1), wide.split(width + columns, dim=1), strict=True):
        same(wide_part[:, :width], part)
        assert (wide_part[:, width:] == 0).all()


@pytest.mark.parametrize("name", WITHOUT_PAIRS)
@settings(max_examples=25)
@given(inputs=batches(), lone=st.booleans())
def test_an_invalid_row_is_as_good_as_absent(name: str, inputs: Inputs, lone: bool) -> None:
    valid = inputs.tensors["valid"]
    without = estimate(name, inputs.rows(valid), lone_sample_keeps_reward=lone)
    same(estimate(name, inputs, lone_sample_keeps_reward=lone)[valid], without)


# What equal rewards are worth where an estimator compares responses with each other. The others have no such comparison: for
# them a reward is worth something, whoever else got it.
COMPARING = ADVANTAGES.stating("compares_responses")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", COMPARING)
@settings(max_examples=15)
@given(inputs=batches(), reward=st.sampled_from([0.7, 0.1, -1 / 3, 1e4]))
def test_equal_rewards_are_worth_exactly_nothing(name: str, inputs: Inputs, reward: float, dtype: torch.dtype) -> None:
    equal = torch.full(inputs.tensors["rewards"].shape, reward, dtype=dtype)
    # one step per trajectory, so that returns are rewards
    alone = {"trajectory_index": torch.arange(len(equal)), "step_index": torch.zeros(len(equal), dtype=torch.int64)}
    result = estimate(name, inputs.with_(**dict.fromkeys(REWARDS, equal), **alone))
    assert (result == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_without_a_valid_response_there_is_nothing_and_no_nan(name: str) -> None:
    garbage = torch.full((4,), math.nan)
    rows = torch.zeros(4, dtype=torch.int64)
    inputs = Inputs(
        dict.fromkeys(PER_ROW[1:5], rows)
        | dict.fromkeys(REWARDS, garbage)
        | dict.fromkeys(PER_TOKEN, torch.full((4, 3), math.nan))
        | {"valid": torch.zeros(4).bool()}
        | dict.fromkeys(MASKS, torch.ones(4, 3).bool())
    )
    assert (estimate(name, inputs) == 0).all()
