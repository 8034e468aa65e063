"""Marks of groups: equal for equal samples, and another for everything that training depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from posttrain.records.marks import mark_of
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import (
    Invalid,
    Outcome,
    OwnDraws,
    Reward,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionSpan,
)

SAMPLE = Trajectory(
    sample_id="p/0",
    token_ids=(3, 5),
    logprobs=(-0.5, -0.25),
    text="ab",
    stop_reason=StopReason.EOS,
    policy_version=2,
)

TURN = Turn(start=0, end=2, text="ab", stop_reason=StopReason.EOS, policy_version=2)


def marked(sample: Trajectory = SAMPLE, outcome: Outcome = Reward(0.5)) -> str:  # noqa: B008  # frozen
    prompt = Prompt(prompt_id="p", token_ids=(1,), text="", data_source="")
    return mark_of(ScoredGroup(group=TrajectoryGroup(prompt=prompt, trajectories=(sample,)), outcomes=(outcome,)))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (3, 6)},
        {"token_ids": (3,), "logprobs": (-0.5,)},
        {"logprobs": (-0.5, -0.25000000001)},
        {"stop_reason": StopReason.LENGTH},
        {"policy_version": 1},
        {"version_spans": (VersionSpan(0, 1), VersionSpan(1, 2))},
        {"response_mask": (True, False)},
        {"prompt_token_ids": (1, 2)},
        {"env_reward": 1.0},
        {"earlier": (SAMPLE,)},
        {"own_draws": (OwnDraws(0, 2, 1.5),)},
        {"turns": (TURN,)},
        {"turns": (replace(TURN, reward=0.5),)},
        {"turns": (replace(TURN, state_key="s"),)},
    ],
)
def test_what_is_learned_from_changes_the_mark(change: dict[str, Any]) -> None:
    assert marked(replace(SAMPLE, **change)) != marked()


def test_outcomes_change_the_mark() -> None:
    outcomes = (
        Reward(0.5),
        Reward(0.25),
        Reward(0.5, terms=(("a", 0.5),)),
        Invalid("timeout"),
        Invalid("error", "in line 3"),
    )
    assert len({marked(outcome=each) for each in outcomes}) == 5


def test_texts_and_measurements_do_not_change_it() -> None:
    other = replace(SAMPLE, text="other", env_metrics=(("seconds", 0.3),))
    assert marked(other, Reward(0.5, texts=(("said", "x"),))) == marked(replace(SAMPLE), Reward(0.5))
    assert marked(outcome=Invalid("error", "at 12:00")) == marked(outcome=Invalid("error", "at 12:01"))


def test_turns_differ_by_reward_and_state() -> None:
    turns = (TURN, replace(TURN, reward=0.5), replace(TURN, state_key="s"), replace(TURN, text="other"))
    assert len({marked(replace(SAMPLE, turns=(each,))) for each in turns}) == 3
