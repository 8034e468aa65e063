"""What estimators see of an episode's turns, from trajectories to advantages."""

from __future__ import annotations

import pytest

from batches import advantages_of
from posttrain.records.plans import AdvantagePlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, ScoredGroup, StopReason, Trajectory, TrajectoryGroup, Turn
from posttrain.steps.assemble import assemble


def turn(start: int, end: int, reward: float) -> Turn:
    return Turn(start=start, end=end, text="", reward=reward, stop_reason=StopReason.EOS, policy_version=0)


def episode() -> ScoredGroup:
    """Turns of 2, 2 and 1 tokens with rewards 1, 2 and 4; between them stand two tokens and one of the environment's."""
    trajectory = Trajectory(
        sample_id="a/0",
        token_ids=tuple(range(3, 11)),
        logprobs=(0.0,) * 8,
        text="",
        stop_reason=StopReason.EOS,
        policy_version=0,
        response_mask=(True, True, False, False, True, True, False, True),
        turns=(turn(0, 2, 1.0), turn(4, 6, 2.0), turn(7, 8, 4.0)),
        env_reward=7.0,
    )
    prompt = Prompt(prompt_id="a", token_ids=(1,), text="", data_source="t")
    group = TrajectoryGroup(prompt=prompt, trajectories=(trajectory,))
    return ScoredGroup(group=group, outcomes=(Reward(7.0, (("environment", 7.0),)),))


@pytest.mark.parametrize(
    ("gamma", "by_turn"),
    [
        (1.0, (7.0, 6.0, 4.0)),
        (0.5, (3.0, 4.0, 4.0)),  # 4; 2 + 4 / 2; 1 + 4 / 2
        (0.0, (1.0, 2.0, 4.0)),
    ],
)
def test_agentic_reinforce_discounts_by_turn(gamma: float, by_turn: tuple[float, ...]) -> None:
    plan = AdvantagePlan(name="agentic_reinforce", parameters={"gamma": gamma})
    first, second, third = by_turn
    advantages = advantages_of(assemble([episode()]), plan).advantages
    assert advantages.tolist() == [[first, first, 0.0, 0.0, second, second, 0.0, third]]


def test_a_rejected_token_does_not_begin_a_turn() -> None:
    batch = assemble([episode()])
    rejected = batch.sequences.response_mask.clone()
    rejected[:, [1, 2, 3, 4, 5, 6, 7]] = False  # the first token
    plan = AdvantagePlan(name="agentic_reinforce", parameters={"gamma": 0.5})
    advantages = advantages_of(batch, plan, rejected=rejected).advantages
    assert advantages.tolist() == [[0.0, 3.0, 0.0, 0.0, 4.0, 4.0, 0.0, 4.0]]
