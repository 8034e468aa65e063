"""Score responses: reward terms, a reward model, an environment's own rewards, and responses that have no score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from posttrain.errors import RunStopped
from posttrain.interfaces.reward import GroupScorer, RewardModel
from posttrain.records.plans import JudgePlan
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
JUDGE = "judge"  # name of the judge's verdict among the terms


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
    judge: RewardModel | None = None,
    judging: JudgePlan | None = None,
) -> list[ScoredGroup]:
    """An outcome for every response: the sum of the reward terms, of model_weight x the reward model's score where there is one,
    of the judge's weighted verdict where it counts, and of the environment's rewards where it gives some.

    Raises: TooManyInvalid when more than ``max_invalid_share`` of the responses could not be scored, with examples: a broken
        reward function must not pass for a policy that learns nothing.
    """
    outcomes = scorer.score(groups)
    if reward_model:
        of_model = reward_model.score(groups)
        outcomes = [
            tuple(with_model(*pair, model_weight) for pair in zip(*both, strict=True))
            for both in zip(outcomes, of_model, strict=True)
        ]
    if judge:
        outcomes = judged(groups, outcomes, judge, judging or JudgePlan())
    scored = [
        ScoredGroup(group=group, outcomes=each).map_outcomes(with_environment)
        for group, each in zip(groups, outcomes, strict=True)
    ]
    check_invalid_share(scored, max_invalid_share)
    return scored


def with_model(terms: Outcome, model: Outcome, weight: float) -> Outcome:
    """The terms' sum + weight x the model's score, which is kept under its name; Invalid when either is."""
    if isinstance(terms, Invalid):
        return terms
    if isinstance(model, Invalid):
        return model
    return _with_term(terms, weight * model.value, MODEL, model.value)


def judged(
    groups: Sequence[TrajectoryGroup], outcomes: Sequence[tuple[Outcome, ...]], judge: RewardModel, plan: JudgePlan
) -> list[tuple[Outcome, ...]]:
    """Outcomes with the judge's verdict on responses to prompts of its data sources."""
    found = [list(each) for each in outcomes]
    asked = [
        number
        for number, group in enumerate(groups)
        if not plan.data_sources or group.prompt.data_source in plan.data_sources
    ]
    verdicts = judge.score([groups[number] for number in asked])
    for number, of_group in zip(asked, verdicts, strict=True):
        found[number] = [
            with_judge(terms, verdict, plan.weight) for terms, verdict in zip(outcomes[number], of_group, strict=True)
        ]
    return [tuple(each) for each in found]


def with_judge(terms: Outcome, verdict: Outcome, weight: float) -> Outcome:
    """The terms' sum + weight x the verdict, which is kept under its name; the verdict alone where no term counts."""
    if isinstance(terms, Invalid):
        if terms.reason != NO_REWARD:
            return terms
        terms = Reward(0.0)
    if isinstance(verdict, Invalid):
        return verdict
    total = _with_term(terms, weight * verdict.value, JUDGE, verdict.value)
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


def check_invalid_share(scored: list[ScoredGroup], max_invalid_share: float) -> None:
    """Raises: TooManyInvalid, with the reasons and some responses of each."""
    failures = [
        (trajectory.sample_id, outcome)
        for group in scored
        for trajectory, outcome in group.pairs
        if isinstance(outcome, Invalid)
    ]
    responses = sum(len(group.outcomes) for group in scored)
    if not failures or len(failures) <= max_invalid_share * responses:
        return
    counts = Counter(failure.reason for _, failure in failures)
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
    examples = "\n".join(
        f"  {sample_id}: {failure.reason}: {failure.detail}" for sample_id, failure in _of_every_reason(failures)[:10]
    )
    raise TooManyInvalid(
        f"{len(failures)} of {responses} responses have no valid reward, more than reward.max_invalid_share "
        f"= {max_invalid_share:g} allows ({reasons}):\n{examples}",
        scored,
    )


def _of_every_reason(failures: Sequence[tuple[str, Invalid]]) -> list[tuple[str, Invalid]]:
    """The first failure of every reason, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    ranked = []
    for sample_id, failure in failures:
        ranked.append((seen[failure.reason], sample_id, failure))
        seen[failure.reason] += 1
    return [(sample_id, failure) for _, sample_id, failure in sorted(ranked, key=lambda each: each[0])]
