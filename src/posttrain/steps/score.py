"""Score responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from posttrain.errors import RunStopped
from posttrain.interfaces.reward import GroupScorer, RewardModel
from posttrain.records.trajectories import (
    Invalid,
    Outcome,
    Reward,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from posttrain.rewards.score import LARGEST, NOT_FINITE
from posttrain.rewards.sources import NO_REWARD

NOT_SAMPLED = "not_sampled"  # the reason of a response that the sampler failed to give
ENVIRONMENT = "environment"  # name of the environment's reward among the terms
MODEL = "model"  # name of the reward model's score among the terms


class TooManyInvalid(RunStopped):
    """More responses without a valid reward than the run allows. ``scored`` holds them all."""

    def __init__(self, message: str, scored: list[ScoredGroup]):
        super().__init__(message)
        self.scored = scored


def score(
    groups: Sequence[TrajectoryGroup],
    scorer: GroupScorer,
    max_invalid_share: float = 1.0,
    *,
    reward_model: RewardModel | None = None,
    model_weight: float = 1.0,
) -> list[ScoredGroup]:
    """An outcome for every response: the terms' sum, with a reward model model_weight x its score besides, and what an
    environment gave.

    Raises: TooManyInvalid when more than ``max_invalid_share`` of the responses could not be scored, with examples: a broken
        reward function must not pass for a policy that learns nothing.
    """
    scored = [
        ScoredGroup(group=group, outcomes=outcomes)
        for group, outcomes in zip(groups, scorer.score(groups), strict=True)
    ]
    if reward_model:
        scored = [
            replace(
                group,
                outcomes=tuple(with_model(*pair, model_weight) for pair in zip(group.outcomes, outcomes, strict=True)),
            )
            for group, outcomes in zip(scored, reward_model.score(groups), strict=True)
        ]
    scored = [
        replace(
            group,
            outcomes=tuple(
                _unless_failed(trajectory, with_environment(outcome, trajectory.env_reward))
                for trajectory, outcome in zip(group.group.trajectories, group.outcomes, strict=True)
            ),
        )
        for group in scored
    ]
    failures = [
        (trajectory.sample_id, outcome)
        for group in scored
        for trajectory, outcome in zip(group.group.trajectories, group.outcomes, strict=True)
        if isinstance(outcome, Invalid)
    ]
    responses = sum(len(group.outcomes) for group in scored)
    if failures and len(failures) > max_invalid_share * responses:
        counts = Counter(failure.reason for _, failure in failures)
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        examples = "\n".join(
            f"  {sample_id}: {failure.reason}: {failure.detail}"
            for sample_id, failure in _of_every_reason(failures)[:10]
        )
        raise TooManyInvalid(
            f"{len(failures)} of {responses} responses have no valid reward, more than reward.max_invalid_share "
            f"= {max_invalid_share:g} allows ({reasons}):\n{examples}",
            scored,
        )
    return scored


def _unless_failed(trajectory: Trajectory, outcome: Outcome) -> Outcome:
    """What failed has no response, or none that was finished; whatever the text was worth, it is no score."""
    if trajectory.stop_reason is StopReason.FAILED:
        return Invalid(trajectory.failure_reason or NOT_SAMPLED, trajectory.failure)
    return outcome


def _of_every_reason(failures: Sequence[tuple[str, Invalid]]) -> list[tuple[str, Invalid]]:
    """The first failure of every reason, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    ranked = []
    for sample_id, failure in failures:
        ranked.append((seen[failure.reason], sample_id, failure))
        seen[failure.reason] += 1
    return [(sample_id, failure) for _, sample_id, failure in sorted(ranked, key=lambda each: each[0])]


def with_environment(terms: Outcome, given: float | None) -> Outcome:
    """The terms' sum + what the environment gave, which is kept under its name; that alone where no term counts."""
    if given is None:
        return terms
    if isinstance(terms, Invalid):
        if terms.reason != NO_REWARD:
            return terms
        terms = Reward(0.0)
    total = terms.value + given
    if not abs(total) <= LARGEST:
        return Invalid(NOT_FINITE, f"the sum of terms and the environment's rewards is {total}")
    return Reward(total, (*terms.terms, (ENVIRONMENT, given)), terms.texts)


def with_model(terms: Outcome, model: Outcome, weight: float) -> Outcome:
    """The terms' sum + weight x the model's score, which is kept under its name; Invalid when either is."""
    if isinstance(terms, Invalid):
        return terms
    if isinstance(model, Invalid):
        return model
    total = terms.value + weight * model.value
    if not abs(total) <= LARGEST:
        return Invalid(NOT_FINITE, f"the sum of terms and model is {total}")
    return Reward(total, (*terms.terms, (MODEL, model.value)), terms.texts)
