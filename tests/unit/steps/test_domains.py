"""The groups of a step of several domains, and statistics over each domain's part."""

from __future__ import annotations

import pytest
import torch

from posttrain.algos.reward_normalization import RunningMoments, normalize_rewards
from posttrain.algos.statistics import whiten, whiten_parts
from posttrain.records.plans import DomainPlan, GroupFilterPlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, ScoredGroup, StopReason, Trajectory, TrajectoryGroup
from posttrain.steps.assemble import assemble
from posttrain.steps.domains import DomainSelection

REFILL = GroupFilterPlan(strategy="refill", above_std=0.0)
MATHS = DomainPlan(name="maths", sources=("math", "gsm"), prompts=2, group_filter=REFILL)
CODE = DomainPlan(name="code", sources=("code",), prompts=1, group_filter=GroupFilterPlan())


def group(name: str, source: str, *rewards: float, tokens: int = 2) -> ScoredGroup:
    trajectories = tuple(
        Trajectory(
            sample_id=f"{name}/{number}",
            token_ids=(5,) * tokens,
            logprobs=(-1.0,) * tokens,
            text="",
            stop_reason=StopReason.EOS,
            policy_version=0,
        )
        for number in range(len(rewards))
    )
    prompt = Prompt(prompt_id=name, token_ids=(1,), text="", data_source=source)
    outcomes = tuple(Reward(value) for value in rewards)
    return ScoredGroup(group=TrajectoryGroup(prompt=prompt, trajectories=trajectories), outcomes=outcomes)


def names(selection: DomainSelection) -> list[str]:
    return [each.group.prompt.prompt_id for each in selection.groups]


def test_each_domain_has_its_own_filter_and_fills_its_own_part() -> None:
    """Flat groups teach nothing in maths, which asks for a spread, and stay in code, which does not."""
    selection = DomainSelection([MATHS, CODE])
    assert selection.wanting == ["maths", "code"]
    selection.add([group("m0", "math", 1.0, 1.0), group("c0", "code", 0.0, 0.0), group("m1", "gsm", 0.0, 1.0)])
    assert selection.wanting == ["maths"] and not selection.complete
    selection.add([group("m2", "math", 0.0, 1.0), group("m3", "math", 1.0, 0.0)])
    assert selection.complete and selection.batches == 2
    assert names(selection) == ["m1", "c0", "m2"]
    assert selection.sampled_tokens == 5 * 2 * 2


def test_metrics_are_of_every_domain() -> None:
    selection = DomainSelection([MATHS, CODE])
    selection.add(
        [group("m0", "math", 0.0, 1.0), group("m1", "gsm", 0.0, 2.0), group("c0", "code", 3.0, 5.0, tokens=4)]
    )
    found = selection.metrics()
    assert found["domain/maths/reward_mean"] == 0.75  # (0 + 1 + 0 + 2) / 4
    assert found["domain/code/reward_mean"] == 4.0
    assert (found["domain/maths/length_mean"], found["domain/code/length_mean"]) == (2.0, 4.0)
    assert (found["domain/maths/prompts"], found["domain/code/prompts"]) == (2.0, 1.0)
    assert (found["rollout/groups_sampled"], found["rollout/groups_passed"]) == (
        2.0,
        2.0,
    )  # of maths, which has a filter


def test_rows_know_the_part_their_statistics_are_taken_over() -> None:
    groups = [group("m", "gsm", 0.0, 1.0), group("c", "code", 2.0)]
    batch = assemble(groups, parts={"math": 0, "gsm": 0, "code": 1})
    assert batch.part_index is not None and batch.part_index.tolist() == [0, 0, 1]
    assert assemble(groups).part_index is None


def test_whitening_is_over_each_part() -> None:
    """Part 0 holds 1 and 3, mean 2, variance 2 (n - 1): (1 - 2) / sqrt 2. Part 1 holds 10 and 10, which become 0."""
    values = torch.tensor([[1.0, 3.0, 99.0], [10.0, 10.0, 99.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    parts = whiten_parts(values, mask, torch.tensor([0, 1]))
    assert parts.tolist() == [pytest.approx([-(2**-0.5), 2**-0.5, 0.0]), [0.0, 0.0, 0.0]]
    assert torch.equal(whiten_parts(values, mask, None), whiten(values, mask))


def test_rewards_of_the_batch_are_normalised_over_each_part() -> None:
    """Part 0: 0 and 2, mean 1, deviation sqrt 2. Part 1: 10 and 30, mean 20, deviation sqrt 200."""
    rewards, valid = torch.tensor([0.0, 10.0, 2.0, 30.0]), torch.ones(4, dtype=torch.bool)
    part_index = torch.tensor([0, 1, 0, 1])
    found = normalize_rewards(
        rewards, valid, torch.arange(4), RunningMoments(), mean="batch", std="batch", part_index=part_index
    )
    assert found.tolist() == pytest.approx([-(2**-0.5), -(2**-0.5), 2**-0.5, 2**-0.5], abs=1e-5)
