"""Score held-out prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from posttrain.algos.validation import mean_over_prompts, sample_statistics
from posttrain.records.trajectories import Invalid, Reward, ScoredGroup


def validation_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Per data source: accuracy (share of responses with a reward of at least 1; no valid reward counts as wrong), mean
    reward of the valid ones, mean length in tokens, share without a valid reward. With several valid responses to a prompt,
    also the spread of their rewards and the best and worst of k of them."""
    by_source: dict[str, list[ScoredGroup]] = defaultdict(list)
    for group in groups:
        by_source[group.group.prompt.data_source].append(group)
    metrics: dict[str, float] = {}
    for source, members in sorted(by_source.items()):
        outcomes = [outcome for group in members for outcome in group.outcomes]
        rewards = [outcome.value for outcome in outcomes if isinstance(outcome, Reward)]
        lengths = [len(trajectory.token_ids) for group in members for trajectory in group.group.trajectories]
        name = f"validation/{source}"
        metrics[f"{name}/accuracy"] = sum(value >= 1 for value in rewards) / len(outcomes)
        if rewards:
            metrics[f"{name}/reward_mean"] = sum(rewards) / len(rewards)
        metrics[f"{name}/length_mean"] = sum(lengths) / len(lengths)
        metrics |= {f"{name}/{statistic}": value for statistic, value in _over_samples(members).items()}
        metrics[f"{name}/invalid_share"] = sum(isinstance(o, Invalid) for o in outcomes) / len(outcomes)
    return metrics


def _over_samples(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """reward_std@N, and reward_best@k and reward_worst@k for k = 2, 4, ..., N; each is the mean over the prompts that have so
    many valid rewards. Empty when no prompt has two."""
    rewards = [[outcome.value for outcome in group.outcomes if isinstance(outcome, Reward)] for group in groups]
    found = mean_over_prompts([sample_statistics(values) for values in rewards if len(values) > 1])
    wanted = {name.removesuffix("/mean"): value for name, value in found.items() if not name.startswith("mean@")}
    return {f"reward_{name}": value for name, value in wanted.items() if "/" not in name}
