"""Normalised rewards do not depend on the order of rows, on the names of groups, or on what stands in invalid rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.algos.reward_normalization import EPSILON, RunningMoments, normalize_rewards

PARTS = ("none", "group", "batch", "running")
ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -3.0]), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
)


@given(rows=ROWS, mean=st.sampled_from(PARTS), std=st.sampled_from(PARTS), seed=st.integers(0, 100))
def test_order_group_names_and_garbage_change_nothing(
    rows: list[tuple[float, int, bool]], mean: str, std: str, seed: int
) -> None:
    rewards = torch.tensor([reward for reward, _, _ in rows])
    groups = torch.tensor([group for _, group, _ in rows])
    valid = torch.tensor([ok for *_, ok in rows])
    moments = RunningMoments().with_rewards(rewards[valid])
    plain = normalize_rewards(rewards, valid, groups, moments, mean=mean, std=std)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    for garbage in (float("nan"), float("inf"), 1e4):
        dirty = torch.where(valid, rewards, garbage)[order]
        again = normalize_rewards(dirty, valid[order], 7 - groups[order], moments, mean=mean, std=std)
        torch.testing.assert_close(again, plain[order], rtol=1e-6, atol=1e-9)
    assert plain.isfinite().all() and (plain[~valid] == 0).all()


@given(rows=ROWS, mean=st.sampled_from(("group", "batch")))
def test_what_is_measured_by_itself_has_mean_0_and_deviation_1(rows: list[tuple[float, int, bool]], mean: str) -> None:
    rewards = torch.tensor([reward for reward, _, _ in rows], dtype=torch.float64)
    groups = torch.tensor([group for _, group, _ in rows])
    valid = torch.tensor([ok for *_, ok in rows])
    result = normalize_rewards(rewards, valid, groups, RunningMoments(), mean=mean, std=mean)
    for name in {int(group) for group in groups} if mean == "group" else [None]:
        members = valid if name is None else valid & (groups == name)
        if not members.any():
            continue
        part = result[members]
        assert abs(float(part.mean())) < 1e-6
        if len(part) > 1 and len(rewards[members].unique()) > 1:
            spread = float(rewards[members].std())
            torch.testing.assert_close(float(part.std()), spread / (spread + EPSILON))
        else:
            assert (part == 0).all()
