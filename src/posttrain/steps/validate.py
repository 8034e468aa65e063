"""Metrics of scored answers to held-out prompts: in a validation and in an evaluation, by the same names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from posttrain.algos.validation import mean_over_prompts, pass_at, sample_statistics, subset_sizes
from posttrain.records.trajectories import Invalid, Outcome, Reward, ScoredGroup, StopReason
from posttrain.steps.measure import environment_means

ACCURACY = "validation/accuracy"  # of all held-out questions together
PASS_SCORE = 1.0  # a response with at least this reward is right
SUCCESS = "success"  # metric of an episode: 1 when its task is done
ANSWER = "pred"  # the text beside a score that says which answer was found; verl's name


def validation_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """The metrics of every data source, as ``validation/<data source>/<name>``; see ``source_metrics``. Lengths are in
    tokens. ``validation/accuracy`` is the one number of a run: the accuracy of all questions, each counted once."""
    metrics: dict[str, float] = {}
    accuracies: list[float] = []
    for source, members in by_source(groups).items():
        per_prompt = [prompt_metrics(group.outcomes) for group in members]
        accuracies += [each["accuracy"] for each in per_prompt]
        found = source_metrics(members, per_prompt)
        lengths = [trajectory.sampled_tokens for group in members for trajectory in group.group.trajectories]
        found["length_mean"] = sum(lengths) / len(lengths)
        episodes = [each for group in members for each in group.group.trajectories if each.turn_texts]
        if episodes:
            found["turns_mean"] = sum(episode.turn_count for episode in episodes) / len(episodes)
            found |= {f"environment/{name}": value for name, value in environment_means(episodes).items()}
        metrics |= {f"validation/{source}/{name}": value for name, value in found.items()}
    if accuracies:
        metrics[ACCURACY] = sum(accuracies) / len(accuracies)
    return metrics


def by_source(groups: Sequence[ScoredGroup]) -> dict[str, list[ScoredGroup]]:
    """The groups of every data source, by name; sources sorted, groups in order."""
    found: dict[str, list[ScoredGroup]] = defaultdict(list)
    for group in groups:
        found[group.group.prompt.data_source].append(group)
    return dict(sorted(found.items()))


def source_metrics(groups: Sequence[ScoredGroup], per_prompt: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the answers to the prompts of one data source: the mean over prompts of ``per_prompt``, the
    ``prompt_metrics`` of each group; the mean of all valid rewards; the share of responses without one, and of these by
    reason."""
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    rewards = [outcome.value for outcome in outcomes if isinstance(outcome, Reward)]
    reasons = Counter(outcome.reason for outcome in outcomes if isinstance(outcome, Invalid))
    metrics = mean_over_prompts(per_prompt)
    if rewards:
        metrics["reward_mean"] = sum(rewards) / len(rewards)
    metrics["invalid_share"] = sum(reasons.values()) / len(outcomes)
    return metrics | {f"invalid/{reason}": count / len(outcomes) for reason, count in sorted(reasons.items())}


def prompt_metrics(outcomes: Sequence[Outcome], pass_score: float = PASS_SCORE) -> dict[str, float]:
    """Metrics of the N answers to one prompt.

    ``accuracy``: the share that is right, a reward of at least ``pass_score``; without a valid reward an answer counts as
    wrong. With N of 2 and more also ``pass@k``, and of the valid rewards ``reward_mean@N``, ``reward_std@N`` (population),
    ``reward_best@k``, ``reward_worst@k`` and, where every valid reward says which answer it found, ``reward_maj@k``, for
    k = 2, 4, ..., N.
    """
    count = len(outcomes)
    rewards = [outcome for outcome in outcomes if isinstance(outcome, Reward)]
    right = sum(reward.value >= pass_score for reward in rewards)
    metrics = {"accuracy": right / count}
    if count == 1:
        return metrics
    metrics |= {f"pass@{size}": pass_at(right, count, size) for size in subset_sizes(count)}
    if rewards:
        found = sample_statistics([reward.value for reward in rewards], votes_of(rewards), samples=count)
        wanted = {name.removesuffix("/mean"): value for name, value in found.items()}
        metrics |= {f"reward_{name}": value for name, value in wanted.items() if "/" not in name}
    return metrics


def episode_metrics(group: ScoredGroup) -> dict[str, float]:
    """Means over the episodes of one prompt that have not failed: ``length_mean`` in sampled tokens, ``turns_mean``, and every
    metric of the environment as ``environment/<name>``. Empty for responses that come from a file."""
    whole = [each for each in group.group.trajectories if each.token_ids and each.stop_reason is not StopReason.FAILED]
    if not whole:
        return {}
    metrics = {"length_mean": sum(each.sampled_tokens for each in whole) / len(whole)}
    episodes = [each for each in whole if each.turn_texts]
    if episodes:
        metrics["turns_mean"] = sum(each.turn_count for each in episodes) / len(episodes)
        metrics |= {f"environment/{name}": value for name, value in environment_means(episodes).items()}
    return metrics


def report_success(groups: Sequence[ScoredGroup]) -> bool:
    """Return True when there are episodes, and each that has not failed reports the metric ``success``."""
    whole = [each for group in groups for each in group.group.trajectories if each.stop_reason is not StopReason.FAILED]
    return bool(whole) and all(SUCCESS in dict(each.env_metrics) for each in whole)


def success_metrics(group: ScoredGroup) -> dict[str, float]:
    """``accuracy`` and ``pass@k`` of one prompt's episodes, of which those are right that report success; a failed one is not."""
    found = [
        each.stop_reason is not StopReason.FAILED and dict(each.env_metrics).get(SUCCESS, 0.0) >= 1.0
        for each in group.group.trajectories
    ]
    sizes = subset_sizes(len(found)) if len(found) > 1 else []
    return {"accuracy": sum(found) / len(found)} | {
        f"pass@{size}": pass_at(sum(found), len(found), size) for size in sizes
    }


def votes_of(rewards: Sequence[Reward]) -> list[str] | None:
    """The answer that was found in each response ("" where none was); None when a reward does not say."""
    answers = [answer_of(reward) for reward in rewards]
    votes = [answer for answer in answers if answer is not None]
    return votes if len(votes) == len(answers) else None


def answer_of(outcome: Outcome) -> str | None:
    """The answer found in the response, by the first term that names it in its text ``pred``; None where no term does."""
    texts = outcome.texts if isinstance(outcome, Reward) else ()
    return next((text for name, text in texts if name.rpartition("/")[2] == ANSWER), None)
