"""Estimators that count turns or steps, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.algos.advantages.agentic_reinforce import agentic_reinforce
from posttrain.algos.advantages.gigpo import gigpo
from posttrain.algos.advantages.reinforce import reinforce
from posttrain.algos.advantages.step_reinforce import step_reinforce
from posttrain.algos.groups import on_tokens
from posttrain.algos.steps import discounted_on_tokens, last_steps, step_returns
from posttrain.errors import ShapeError


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def bools(*values: int) -> Tensor:
    return torch.tensor(values).bool()


def test_reinforce_is_the_discounted_return() -> None:
    # from the end: 8; tool output is skipped; 0 + 0.5 x 8 = 4; 2 + 0.5 x 4 = 4
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]).bool()
    rewards = torch.tensor([[2.0, 0.0, 100.0, 8.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    advantages = reinforce(rewards, bools(1, 0), mask, gamma=0.5)
    assert advantages.tolist() == [[4.0, 4.0, 0.0, 8.0, 0.0], [0.0] * 5]


def test_agentic_reinforce_discounts_by_turn() -> None:
    # turns of 2, 1 and 2 tokens with rewards 0 + 1, 2 and 0 + 4: C = 4; 2 + 0.5 x 4 = 4; 1 + 0.5 x 4 = 3
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]]).bool()
    rewards = torch.zeros(3, 8)
    rewards[0] = torch.tensor([0.0, 1.0, 9.0, 2.0, 9.0, 9.0, 0.0, 4.0])
    rewards[1, 2] = 5.0  # one turn: its reward, on every token
    begins = torch.tensor([[1, 0, 0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0] * 8]).bool()
    advantages = agentic_reinforce(rewards, bools(1, 1, 1), mask, begins, gamma=0.5)
    assert advantages[0].tolist() == [3, 3, 0, 4, 0, 0, 4, 4]
    assert advantages[1].tolist() == [5, 5, 5, 0, 0, 0, 0, 0]
    assert not advantages[2].any()
    with pytest.raises(ShapeError, match="token_rewards"):
        agentic_reinforce(rewards[:2], bools(1, 1, 1), mask, begins)


# Trajectory 0: rows 0, 3, 1 with rewards 1, 2, 4; trajectory 1: row 2 with 3; row 4, of trajectory 1, is not valid.
TRAJECTORY, STEP = ints(0, 0, 1, 0, 1), ints(0, 7, 0, 3, 1)
VALID, STEP_REWARDS = bools(1, 1, 1, 1, 0), torch.tensor([1.0, 4.0, 3.0, 2.0, 100.0])


def test_returns_go_over_the_steps_of_a_trajectory() -> None:
    # 4; 2 + 0.5 x 4 = 4; 1 + 0.5 x 4 = 3
    assert step_returns(STEP_REWARDS, VALID, TRAJECTORY, STEP, 0.5).tolist() == [3, 4, 3, 4, 0]


def test_last_steps_speak_for_their_trajectory() -> None:
    rows = last_steps(VALID, TRAJECTORY, STEP)
    assert rows.tolist() == [1, 1, 2, 1, 4]
    per_trajectory = torch.tensor([0.0, 7.0, 8.0, 0.0, 0.0])  # an estimate of the last steps alone
    assert per_trajectory[rows].tolist() == [7, 7, 8, 7, 0]


def test_step_reinforce_is_the_return_of_the_step_on_all_its_tokens() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1], [1, 1]]).bool()
    advantages = step_reinforce(STEP_REWARDS, VALID, TRAJECTORY, STEP, mask, TRAJECTORY, step_gamma=0.5)
    assert advantages.tolist() == [[3, 3], [4, 0], [3, 3], [0, 4], [0, 0]]


def test_step_reinforce_normalises_returns_like_rewards() -> None:
    # returns 3, 4, 3, 4 (the last row is not valid); trajectory 0 is group 0, trajectory 1 group 1
    mask, groups = torch.ones(5, 1).bool(), ints(0, 0, 1, 0, 1)

    def one(**given: object) -> list[float]:
        return (
            step_reinforce(STEP_REWARDS, VALID, TRAJECTORY, STEP, mask, groups, step_gamma=0.5, **given)
            .flatten()
            .tolist()
        )

    # mean 3.5: -0.5, 0.5, -0.5, 0.5
    assert one(returns_mean="batch") == [-0.5, 0.5, -0.5, 0.5, 0]
    # group 0 has 3, 4, 4: mean 11/3, so -2/3, 1/3, 1/3; group 1 has one step: 0
    assert one(returns_mean="group") == pytest.approx([-2 / 3, 1 / 3, 0, 1 / 3, 0])
    # and the sample deviation of 3, 4, 4 is sqrt(1/3) = 0.57735
    assert one(returns_mean="group", returns_std="group") == pytest.approx([-1.1547, 0.57735, 0, 0.57735, 0], abs=1e-5)
    assert one(returns_clip=3.5) == [3, 3.5, 3, 3.5, 0]


def test_a_discount_per_token_counts_the_tokens_behind() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 1]]).bool()
    spread = discounted_on_tokens(torch.tensor([8.0, 2.0]), mask, 0.5)
    assert spread.tolist() == [[2, 4, 8, 0], [0, 1, 0, 2]]


def test_gigpo_compares_trajectories_and_steps_of_one_state() -> None:
    # one group; trajectory 0 has two steps and reward 2, trajectory 1 one step and reward 0.
    # episodes: 2 and 0, mean 1: +1, -1, and std sqrt(2): +-0.70711
    # steps: trajectory 0 began in state 5 (return 0 + 0.5 x 2 = 1) and went to 6 (2), trajectory 1 began in 5 (0).
    # state 5: 1 and 0, mean 0.5: +-0.5, and std 0.70711: +-0.70711; state 6 has one step: 0
    given = {
        "episode_rewards": torch.tensor([2.0, 2.0, 0.0]),
        "step_rewards": torch.tensor([0.0, 2.0, 0.0]),
        "valid": bools(1, 1, 1),
        "group_index": ints(0, 0, 0),
        "trajectory_index": ints(0, 0, 1),
        "step_index": ints(0, 1, 0),
        "state_index": ints(5, 6, 5),
        "response_mask": torch.ones(3, 1).bool(),
        "turn_penalties": torch.zeros(3),
    }
    plain = gigpo(**given, step_gamma=0.5, step_weight=0.5, normalize_by_std=False)
    assert plain.flatten().tolist() == [1 + 0.25, 1, -1 - 0.25]
    scaled = gigpo(**given, step_gamma=0.5)
    assert scaled.flatten().tolist() == pytest.approx([1.41421, 0.70711, -1.41421], abs=1e-4)
    # returns of steps as they are: 1, 2, 0, and rewards of trajectories against the mean of all three rows' two: 1
    as_they_are = gigpo(**given, step_gamma=0.5, compare_steps=False, episode_mean="batch", episode_std="none")
    assert as_they_are.flatten().tolist() == [1 + 1, 1 + 2, -1 + 0]
    cut = gigpo(**given, step_gamma=0.5, compare_steps=False, episode_mean="none", episode_std="none", total_clip=2.5)
    assert cut.flatten().tolist() == [2.5, 2.5, 0]  # 2 + 1 and 2 + 2, cut
    # an equal state of another group is another place
    apart = gigpo(**given | {"group_index": ints(0, 0, 1)}, step_gamma=0.5)
    assert apart.flatten().tolist() == [0, 0, 0]


def test_the_trajectories_of_a_group_count_once_each() -> None:
    # rewards 3 (three steps), 0 (one step): mean 1.5, not the 2.25 of the four rows
    zeros, ones = torch.zeros(4), torch.ones(4).bool()
    advantages = gigpo(
        torch.tensor([3.0, 3.0, 3.0, 0.0]),
        zeros,
        ones,
        torch.zeros(4, dtype=torch.int64),
        ints(0, 0, 0, 1),
        ints(0, 1, 2, 0),
        ints(1, 2, 3, 4),
        on_tokens(torch.ones(4), ones[:, None]).bool(),
        zeros,
        normalize_by_std=False,
    )
    assert advantages.flatten().tolist() == [1.5, 1.5, 1.5, -1.5]


def test_a_long_trajectory_counts_once_per_step_where_rows_are_compared() -> None:
    # as above, with the penalty 1 on the first step: rewards of the rows 2, 3, 3, 0, mean 2, sample std sqrt(6 / 3) = 1.41421
    # steps: 0 - 1 = -1 in state 1, 0 in state 1, 0 in 3, 0 in 4. State 1: mean -0.5, std 0.70711: -+0.70711
    given = {
        "episode_rewards": torch.tensor([2.0, 3.0, 3.0, 0.0]),
        "step_rewards": torch.zeros(4),
        "valid": bools(1, 1, 1, 1),
        "group_index": ints(0, 0, 0, 0),
        "trajectory_index": ints(0, 0, 0, 1),
        "step_index": ints(0, 1, 2, 0),
        "state_index": ints(1, 1, 3, 4),
        "response_mask": torch.ones(4, 1).bool(),
        "turn_penalties": torch.tensor([1.0, 0.0, 0.0, 0.0]),
    }
    plain = gigpo(**given, episodes_by_step=True, normalize_by_std=False)
    assert plain.flatten().tolist() == [0 - 0.5, 1 + 0.5, 1, -2]
    scaled = gigpo(**given, episodes_by_step=True)
    assert scaled.flatten().tolist() == pytest.approx([-0.70711, 0.70711 * 2, 0.70711, -1.41421], abs=1e-4)
    # a penalty is not handed back to earlier steps, as a reward is: 0 + 0.5 x (2 - 1) would be 0.5
    later = given | {
        "step_rewards": torch.tensor([0.0, 2.0, 0.0, 0.0]),
        "turn_penalties": torch.tensor([0.0, 1.0, 0.0, 0.0]),
    }
    returns = gigpo(**later, episodes_by_step=True, episode_weight=0.0, compare_steps=False, step_gamma=0.5)
    assert returns.flatten().tolist() == [1, 1, 0, 0]
