"""Turns as responses of their own: each has the reward of its episode, less its own penalty."""

from __future__ import annotations

from dataclasses import replace

import pytest

from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import (
    Invalid,
    Outcome,
    Reward,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from posttrain.steps.assemble import assemble
from posttrain.steps.turns import with_turns_as_responses


def sample(name: str, reward: float, penalty: float, state: str) -> Trajectory:
    turn = Turn(
        start=0,
        end=2,
        text="",
        reward=reward,
        penalty=penalty,
        state_key=state,
        stop_reason=StopReason.EOS,
        policy_version=0,
    )
    return Trajectory(
        sample_id=name,
        token_ids=(3, 4),
        logprobs=(-0.5, -0.5),
        text="",
        stop_reason=StopReason.EOS,
        policy_version=0,
        prompt_token_ids=(1, 2),
        turns=(turn,),
    )


def episode(name: str, *turns: tuple[float, float, str]) -> Trajectory:
    samples = [sample(f"{name}#{place}", *turn) for place, turn in enumerate(turns)]
    return replace(samples[-1], earlier=tuple(samples[:-1]))


def test_every_turn_has_the_reward_of_its_episode_less_its_own_penalty() -> None:
    trajectories = (
        episode("a", (0.0, 0.1, "start"), (1.0, 0.0, "next")),
        episode("b", (0.25, 0.5, "start")),
        episode("c", (0.0, 0.5, "start")),
    )
    outcomes: tuple[Outcome, ...] = (Reward(1.0, ()), Reward(0.25, ()), Invalid("env_crashed", ""))
    prompt = Prompt(prompt_id="p", token_ids=(1, 2), text="q", data_source="t")
    groups = [ScoredGroup(group=TrajectoryGroup(prompt=prompt, trajectories=trajectories), outcomes=outcomes)]
    batch = with_turns_as_responses(assemble(groups), groups)
    assert batch.rewards.tolist() == pytest.approx([1 - 0.1, 1, 0.25 - 0.5, 0])
    assert batch.valid.tolist() == [True, True, True, False]
    assert batch.sequences.trajectory_index.tolist() == [0, 1, 2, 3]
    assert batch.sequences.last_rows.all()
    extras = {name: value.tolist() for name, value in batch.extras.items()}  # type: ignore[union-attr]
    assert extras["trajectory_index"] == [0, 0, 1, 2] and extras["step_index"] == [0, 1, 0, 0]
    assert extras["step_rewards"] == [0, 1, 0.25, 0]
    assert extras["turn_penalties"] == pytest.approx([0.1, 0, 0.5, 0.5])
    assert extras["state_index"][0] == extras["state_index"][2] != extras["state_index"][1]


def test_states_that_are_alike_are_one_within_a_group() -> None:
    # 2 x 3 / 8 = 0.75 for abcd and abce; 2 x 2 / 8 = 0.5 for abcd and abxe. abxe and abce would be 0.75, but abce is no first
    prompt = Prompt(prompt_id="p", token_ids=(1, 2), text="q", data_source="t")
    groups = [
        ScoredGroup(
            group=TrajectoryGroup(prompt=prompt, trajectories=tuple(episode(name, (0.0, 0.0, name)) for name in names)),
            outcomes=tuple(Reward(0.0, ()) for _ in names),
        )
        for names in (("abcd", "abce", "abxe"), ("abcd",))
    ]
    batch = with_turns_as_responses(assemble(groups), groups, 0.7)
    assert batch.extras["state_index"].tolist() == [0, 0, 1, 2]  # type: ignore[union-attr]
