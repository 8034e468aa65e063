"""The greedy response to each prompt, with a scripted sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.errors import RequestError
from posttrain.records.plans import AdvantagePlan, LossPlan, RewardPlan, StepPlan, UpdatePlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import (
    Invalid,
    Outcome,
    Reward,
    SamplingParams,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from posttrain.run.clock import Clock
from posttrain.run.trackers import Trackers
from posttrain.steps.assemble import assemble
from posttrain.steps.extras import add_columns, add_greedy_rewards
from posttrain.steps.rl_step import collect

SAMPLING = SamplingParams(samples_per_prompt=2, max_response_tokens=4, temperature=0.8, top_p=0.9, top_k=7, stop=("x",))


def group(name: str, samples: int = 2, stop: StopReason = StopReason.EOS) -> TrajectoryGroup:
    return TrajectoryGroup(
        prompt=Prompt(prompt_id=name, token_ids=(1,), text=name, data_source="t"),
        trajectories=tuple(
            Trajectory(
                sample_id=f"{name}/{number}",
                token_ids=(5, 6),
                logprobs=(-1.0, -1.0),
                text=name,
                stop_reason=stop,
                policy_version=0,
            )
            for number in range(samples)
        ),
    )


class Sampler:
    version = 0

    def __init__(self, stop: StopReason = StopReason.EOS) -> None:
        self.asked: list[tuple[list[str], SamplingParams]] = []
        self.stop = stop

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *on: Any) -> list[TrajectoryGroup]:
        self.asked.append(([prompt.prompt_id for prompt in prompts], sampling))
        return [group(prompt.prompt_id, 1, self.stop) for prompt in prompts]


class Scorer:
    """a: 3, b: none, everything else 1."""

    def begin(self, group: TrajectoryGroup) -> None:
        pass

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        outcomes: dict[str, Outcome] = {"a": Reward(3.0), "b": Invalid("exception")}
        return [(outcomes.get(group.prompt.prompt_id, Reward(1.0)),) for group in groups]


def baseline(sampler: Sampler, plan: RewardPlan, estimator: str = "remax") -> list[float]:
    # the group of a stands in two places (a filter that replaces), and is one prompt
    groups = [ScoredGroup(group=group(name), outcomes=(Reward(0.0), Reward(0.0))) for name in ("a", "b", "c", "a")]
    roles: Any = SimpleNamespace(
        policy=SimpleNamespace(version=0),
        rollout=sampler,
        reward_model=None,
        judges={},
        worlds=None,
        most_tokens=lambda prompts, sampling: None,
    )
    loss = LossPlan(name="ppo_clip", aggregation="token_mean", temperature=1.0)
    step = StepPlan(
        prompts=4,
        sampling=SAMPLING,
        reward=plan,
        advantage=AdvantagePlan(name=estimator),
        update=UpdatePlan(loss=loss, epochs=1, sequences_per_update=8, on_policy=True),
        max_invalid_share=0.0,
    )
    clock = Clock(Trackers([], []), 1)
    batch = add_greedy_rewards(assemble(groups), groups, roles, Scorer(), step, clock, collect)
    values = batch.extras["greedy_rewards"].tolist() if batch.extras else []
    return [str(value) if math.isnan(value) else value for value in values]


def test_one_greedy_response_per_prompt_for_all_its_rows() -> None:
    sampler = Sampler()
    assert baseline(sampler, RewardPlan()) == [3, 3, "nan", "nan", 1, 1, 3, 3]
    ((prompts, sampling),) = sampler.asked
    assert prompts == ["a", "b", "c"]
    greedy = replace(SAMPLING, samples_per_prompt=1, temperature=0.0, top_p=1.0, top_k=0)
    assert sampling == greedy


def test_the_baseline_is_shaped_as_the_samples_are() -> None:
    assert baseline(Sampler(), RewardPlan(clip=2.0))[0] == 2
    assert baseline(Sampler(StopReason.LENGTH), RewardPlan(zero_unless_stopped=True))[0] == 0


def test_nothing_is_sampled_for_an_estimator_without_the_baseline() -> None:
    sampler = Sampler()
    assert baseline(sampler, RewardPlan(), "grpo") == [] and sampler.asked == []


def test_columns_of_the_data_stand_beside_every_row(tmp_path: Path) -> None:
    """For an estimator written for verl, whose own trainer hands over columns."""
    (tmp_path / "core_algos.py").write_text(
        "def compute_fair_advantage(token_level_rewards, response_mask, index, domains: Tensor, source: Tensor):\n"
        "    return token_level_rewards, token_level_rewards\n"
    )
    (tmp_path / "ray_trainer.py").write_text(
        "def compute_advantage(data):\n    source = data.non_tensor_batch['data_source']\n"
        "    a, b = core_algos.compute_fair_advantage(domains=data.non_tensor_batch['dataset'], source=source)\n"
    )
    fair = AdvantagePlan(name="fair", path=str(tmp_path / "core_algos.py"))
    step: Any = SimpleNamespace(advantage=fair, turn_is_response=False)
    groups = []
    for name, domain in (("a", "sums"), ("b", "words")):
        found = group(name)
        found = replace(found, prompt=replace(found.prompt, extra_info={"dataset": domain}))
        groups.append(ScoredGroup(group=found, outcomes=(Reward(0.0), Reward(1.0))))
    batch = add_columns(assemble(groups), groups, step)
    assert batch.extras["column:dataset"] == ("sums", "sums", "words", "words")
    assert batch.extras["column:data_source"] == (groups[0].group.prompt.data_source,) * 4
    lacking = [ScoredGroup(group=group("c"), outcomes=(Reward(0.0), Reward(1.0)))]
    with pytest.raises(RequestError, match="reads the column dataset, which the row of c does not have"):
        add_columns(assemble(lacking), lacking, step)
