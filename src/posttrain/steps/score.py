"""Score responses: reward terms, a reward model, an environment's own rewards, and responses that have no score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.errors import RunStopped
from posttrain.interfaces.reward import GroupScorer, RewardModel
from posttrain.records.plans import JudgePlan
from posttrain.records.trajectories import ScoredGroup, TrajectoryGroup
from posttrain.steps.added_rewards import judged, with_environment, with_model
from posttrain.steps.failures import counted, examples, failures_of


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
    judges: Mapping[str, RewardModel] | None = None,
    judging: Mapping[str, JudgePlan] | None = None,
) -> list[ScoredGroup]:
    """An outcome for every response: the sum of the reward terms, of model_weight x the reward model's score where there is one,
    of the weighted verdict of each judge where it counts, and of the environment's rewards where it gives some.

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
    for name, judge in (judges or {}).items():
        outcomes = judged(groups, outcomes, judge, (judging or {}).get(name, JudgePlan()), name)
    scored = [
        ScoredGroup(group=group, outcomes=each).map_outcomes(with_environment)
        for group, each in zip(groups, outcomes, strict=True)
    ]
    check_invalid_share(scored, max_invalid_share)
    return scored


def check_invalid_share(scored: list[ScoredGroup], max_invalid_share: float) -> None:
    """Raises: TooManyInvalid, with the reasons and some responses of each."""
    failures = failures_of(scored)
    responses = sum(len(group.outcomes) for group in scored)
    if not failures or len(failures) <= max_invalid_share * responses:
        return
    raise TooManyInvalid(
        f"{len(failures)} of {responses} responses have no valid reward, more than reward.max_invalid_share "
        f"= {max_invalid_share:g} allows ({counted(failures)}):\n{examples(failures)}",
        scored,
    )
