"""Rewards beside the reward terms: a reward model's score, a judge's verdict, an environment's own rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posttrain.config.judge import JUDGE
from posttrain.interfaces.reward import RewardModel
from posttrain.records.plans import JudgePlan
from posttrain.records.trajectories import Invalid, Outcome, Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.score import LARGEST, NOT_FINITE
from posttrain.rewards.sources import NO_REWARD

NOT_SAMPLED = "not_sampled"  # the reason of a response that the sampler failed to give
ENVIRONMENT = "environment"  # name of the environment's reward among the terms
MODEL = "model"  # name of the reward model's score among the terms


def with_model(terms: Outcome, model: Outcome, weight: float) -> Outcome:
    """The terms' sum + weight x the model's score, which is kept under its name; Invalid when either is."""
    if isinstance(terms, Invalid):
        return terms
    if isinstance(model, Invalid):
        return model
    return _with_term(terms, weight * model.value, MODEL, model.value)


def judged(
    groups: Sequence[TrajectoryGroup],
    outcomes: Sequence[tuple[Outcome, ...]],
    judge: RewardModel,
    plan: JudgePlan,
    name: str = JUDGE,
) -> list[tuple[Outcome, ...]]:
    """Outcomes with a judge's verdict, under its name, on responses to prompts of its data sources."""
    found = [list(each) for each in outcomes]
    asked = [
        number
        for number, group in enumerate(groups)
        if not plan.data_sources or group.prompt.data_source in plan.data_sources
    ]
    verdicts = judge.score([groups[number] for number in asked])
    for number, of_group in zip(asked, verdicts, strict=True):
        found[number] = [
            with_judge(terms, verdict, plan.weight, name)
            for terms, verdict in zip(outcomes[number], of_group, strict=True)
        ]
    return [tuple(each) for each in found]


def with_judge(terms: Outcome, verdict: Outcome, weight: float, name: str = JUDGE) -> Outcome:
    """The terms' sum + weight x the verdict, which is kept under its name; the verdict alone where no term counts."""
    if isinstance(terms, Invalid):
        if terms.reason != NO_REWARD:
            return terms
        terms = Reward(0.0)
    if isinstance(verdict, Invalid):
        return verdict
    total = _with_term(terms, weight * verdict.value, name, verdict.value)
    return replace(total, texts=(*total.texts, *verdict.texts)) if isinstance(total, Reward) else total


def with_environment(trajectory: Trajectory, terms: Outcome) -> Outcome:
    """The terms' sum + the environment's rewards, which are kept under its name; these alone where no term counts.

    A failed trajectory is Invalid: it has no response, or none that was finished, so its text deserves no score.
    """
    if trajectory.stop_reason is StopReason.FAILED:
        return Invalid(trajectory.failure_reason or NOT_SAMPLED, trajectory.failure)
    given = trajectory.env_reward
    if given is None:
        return terms
    if isinstance(terms, Invalid):
        if terms.reason != NO_REWARD:
            return terms
        terms = Reward(0.0)
    return _with_term(terms, given, ENVIRONMENT, given)


def _with_term(terms: Reward, added: float, name: str, value: float) -> Outcome:
    total = terms.value + added
    if not abs(total) <= LARGEST:
        of = "the environment's rewards" if name == ENVIRONMENT else name
        return Invalid(NOT_FINITE, f"the sum of terms and {of} is {total}")
    return Reward(total, (*terms.terms, (name, value)), terms.texts)
