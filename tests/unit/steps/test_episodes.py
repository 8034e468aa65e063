"""What becomes of the rewards, lengths and metrics of episodes on their way to the update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batches import advantages_of
from posttrain.records.batches import TrainerLogprobs
from posttrain.records.plans import AdvantagePlan, GroupFilterPlan, KlRewardPlan, RewardPlan
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
from posttrain.rewards.no_terms import NothingToScore
from posttrain.steps.assemble import assemble
from posttrain.steps.episode import version_spans
from posttrain.steps.measure import episode_metrics, length_metrics
from posttrain.steps.score import score
from posttrain.steps.select import Selection
from posttrain.steps.shape_rewards import RewardState, shape_outcomes, shape_rewards
from posttrain.steps.validate import validation_metrics

PROMPT = Prompt(prompt_id="p", token_ids=(1, 2), text="", data_source="maze")


def an_episode(rewards: tuple[float | None, ...], number: int = 0, **changes: Any) -> Trajectory:
    """Turns of two sampled tokens, with three tokens of observations in between."""
    turns = tuple(
        Turn(
            start=5 * index,
            end=5 * index + 2,
            text=f"t{index}",
            reward=reward,
            stop_reason=StopReason.EOS,
            policy_version=0,
        )
        for index, reward in enumerate(rewards)
    )
    length = turns[-1].end
    given = [reward for reward in rewards if reward is not None]
    values: dict[str, Any] = {
        "sample_id": f"p/{number}",
        "token_ids": tuple(range(10, 10 + length)),
        "logprobs": (0.0,) * length,
        "text": "",
        "stop_reason": StopReason.EOS,
        "policy_version": 0,
        "response_mask": tuple(place % 5 < 2 for place in range(length)),
        "turns": turns,
        "env_reward": sum(given) if given else None,
    }
    return Trajectory(**{**values, **changes})


def in_two_samples(number: int = 0) -> Trajectory:
    """A turn of reward 1, and, after its history was edited, one of reward 2."""
    first = an_episode((1.0,), sample_id=f"p/{number}#0", prompt_token_ids=(1,))
    return replace(an_episode((2.0,), number), earlier=(first,), env_reward=3.0)


def a_group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(prompt=PROMPT, trajectories=trajectories)


def scored(*pairs: tuple[Trajectory, Outcome]) -> ScoredGroup:
    return ScoredGroup(group=a_group(*(pair[0] for pair in pairs)), outcomes=tuple(pair[1] for pair in pairs))


def test_the_environment_s_reward_is_the_score() -> None:
    lost = an_episode((1.0,), 1, stop_reason=StopReason.FAILED, failure="it hung", failure_reason="env_timeout")
    silent = an_episode((None, None), 2)
    (group,) = score([a_group(an_episode((1.0, 0.5)), lost, silent)], NothingToScore())
    first, second, third = group.outcomes
    assert first == Reward(1.5, (("environment", 1.5),))
    assert second == Invalid("env_timeout", "it hung")
    assert isinstance(third, Invalid) and "the environment gave no reward" in third.detail


class Terms(NothingToScore):
    def score(self, groups: Any) -> list[tuple[Outcome, ...]]:
        return [(Reward(0.25, (("format", 0.25),)), Invalid("timeout", "late")) for _ in groups]


def test_terms_are_added() -> None:
    (group,) = score([a_group(an_episode((1.0,)), an_episode((1.0,), 1))], Terms())
    assert group.outcomes == (Reward(1.25, (("format", 0.25), ("environment", 1.0))), Invalid("timeout", "late"))


def test_rewards_stand_on_the_last_tokens_of_their_turns() -> None:
    # 1 and 0.5 on tokens 1 and 6; the 0.25 of a term comes on the last sampled token, 6, too
    batch = assemble([scored((an_episode((1.0, 0.5)), Reward(1.75)), (an_episode((None,), 1), Reward(2.0)))])
    assert batch.turn_rewards is not None
    assert batch.turn_rewards.tolist() == [[0, 1.0, 0, 0, 0, 0, 0.75], [0, 2.0, 0, 0, 0, 0, 0]]
    assert batch.sequences.response_mask.long().tolist() == [[1, 1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert "state_index" not in batch.extras  # turns without keys
    plain = assemble([scored((an_episode((None,)), Reward(2.0)))])
    assert plain.turn_rewards is None


def test_no_reward_is_left_of_what_did_not_stop() -> None:
    cut = an_episode((1.0, 0.5), stop_reason=StopReason.LENGTH)
    (group,) = shape_outcomes([scored((cut, Reward(1.5)), (an_episode((1.0,), 1), Reward(1.0)))],
                              RewardPlan(zero_unless_stopped=True))  # fmt: skip
    batch = assemble([group])
    assert batch.rewards.tolist() == [0.0, 1.0]
    assert batch.turn_rewards is not None
    assert batch.turn_rewards.tolist() == [[0.0] * 7, [0, 1.0, 0, 0, 0, 0, 0]]


def test_a_trajectory_counts_once_in_normalisation() -> None:
    # rewards 3 (two rows) and 1 (one row): the mean over trajectories is 2, so 1 and -1; over rows it would be 7/3
    group = scored((in_two_samples(), Reward(3.0)), (an_episode((1.0,), 1), Reward(1.0)))
    shaped = shape_rewards(
        assemble([group]), TrainerLogprobs(), RewardPlan(normalize_mean="batch"), RewardState(KlRewardPlan(coef=0.0))
    )
    assert shaped.rewards.tolist() == [1.0, 1.0, -1.0]
    assert shaped.token_rewards is not None
    # 3 became 1: the change of -2 stands on the last token of the last row
    assert shaped.token_rewards[:, :2].tolist() == [[0, 1.0], [0, 0.0], [0, -1.0]]


def test_kl_is_taken_from_all_rows_of_a_trajectory() -> None:
    batch = assemble([scored((in_two_samples(), Reward(3.0)))])
    logprobs = TrainerLogprobs(old=torch.full((2, 2), -0.5), ref=torch.full((2, 2), -1.0))
    shaped = shape_rewards(batch, logprobs, RewardPlan(kl=KlRewardPlan(coef=0.1)), RewardState(KlRewardPlan(coef=0.1)))
    # k1 = 0.5 on each of 4 tokens: 0.05 less on each, 3 - 0.2 in all, on both rows
    assert shaped.rewards.tolist() == pytest.approx([2.8, 2.8])
    assert shaped.token_rewards is not None
    assert shaped.token_rewards.flatten().tolist() == pytest.approx([-0.05, 0.95, -0.05, 1.95])


def test_grpo_compares_trajectories_not_rows() -> None:
    group = scored((in_two_samples(), Reward(3.0)), (an_episode((1.0,), 1), Reward(1.0)))
    train = advantages_of(assemble([group]), AdvantagePlan(name="grpo", parameters={"normalize_by_std": False}))
    assert train.advantages.tolist() == [[1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]]
    assert train.loss_mask.all()


def test_returns_go_on_from_row_to_row() -> None:
    batch = assemble([scored((in_two_samples(), Reward(3.0)))])
    train = advantages_of(batch, AdvantagePlan(name="reinforce", parameters={"gamma": 0.5}))
    # rewards 0 1 | 0 2: returns from the end 2, 1, 1 + .5, .75
    assert train.advantages.tolist() == [[0.75, 1.5], [1.0, 2.0]]


def test_lengths_are_of_what_was_sampled() -> None:
    group = scored((in_two_samples(), Reward(3.0)), (an_episode((1.0, 0.5), 1), Reward(1.5)))
    metrics = length_metrics([group])
    assert (metrics["response/length_mean"], metrics["step/response_tokens"]) == (4.0, 8.0)
    assert metrics["prompt/length_mean"] == 1.0  # the one that the first episode began with
    selection = Selection(GroupFilterPlan(), 1)
    selection.add([group])
    assert selection.sampled_tokens == 8


def test_metrics_of_episodes() -> None:
    ended = an_episode((1.0, 0.5), 1, env_stop="solved", env_metrics=(("moves", 2.0), ("wins", 1.0)))
    group = scored((replace(in_two_samples(), env_metrics=(("moves", 4.0),)), Reward(3.0)), (ended, Reward(1.5)))
    assert episode_metrics([group]) == {
        "episode/turns_mean": 2.0,
        "episode/turns_max": 2.0,
        "episode/observation_tokens_mean": 1.5,  # 0 and 3
        "episode/samples_mean": 1.5,
        "episode/close_failed": 0.0,
        "episode/stop/solved": 0.5,
        "environment/moves": 3.0,
        "environment/wins": 1.0,
    }
    unclosed = replace(ended, close_failure="env_crashed: no")
    assert episode_metrics([scored((unclosed, Reward(1.5)), (ended, Reward(1.5)))])["episode/close_failed"] == 1.0
    found = validation_metrics([group])
    assert found["validation/maze/turns_mean"] == 2.0 and found["validation/maze/environment/moves"] == 3.0
    plain = replace(ended, turns=(), env_metrics=())
    assert episode_metrics([scored((plain, Reward(1.0)))]) == {}


def test_turns_of_different_weights_are_spans() -> None:
    def turn(start: int, version: int) -> Turn:
        return Turn(start=start, end=start + 2, text="", stop_reason=StopReason.EOS, policy_version=version)

    assert version_spans([turn(0, 3), turn(5, 3)]) == ()
    assert version_spans([turn(0, 3), turn(5, 3), turn(8, 4), turn(12, 6)]) == ((0, 3), (8, 4), (12, 6))
    assert version_spans([]) == ()
