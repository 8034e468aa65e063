"""Several answers to one held-out prompt: what the mean, the best, the worst and the majority of them are worth."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

import torch

DRAWS = 1000


def subset_sizes(samples: int) -> list[int]:
    """2, 4, 8, ... below the number of samples, and that number itself; none for a single sample."""
    if samples < 2:
        return []
    return [*(2**power for power in range(1, samples.bit_length()) if 2**power < samples), samples]


def best_of(values: Sequence[float], size: int) -> tuple[float, float]:
    """Mean and standard deviation (population) of the largest of ``size`` values drawn with replacement.

    Exact, where verl draws 1000 times: the largest is at most the i-th smallest value with probability (i / N)^size.
    """
    ordered, count = sorted(values), len(values)
    chances = [((i + 1) / count) ** size - (i / count) ** size for i in range(count)]
    mean = sum(chance * value for chance, value in zip(chances, ordered, strict=True))
    variance = sum(chance * (value - mean) ** 2 for chance, value in zip(chances, ordered, strict=True))
    return mean, variance**0.5


def worst_of(values: Sequence[float], size: int) -> tuple[float, float]:
    """The same of the smallest."""
    mean, std = best_of([-value for value in values], size)
    return -mean, std


def majority_value(votes: Sequence[Hashable], values: Sequence[float]) -> float:
    """The value of the first answer that agrees with the most frequent one; among equally frequent ones, of the one that
    comes first."""
    winner = Counter(votes).most_common(1)[0][0]
    return values[list(votes).index(winner)]


def majority_of(
    votes: Sequence[Hashable], values: Sequence[float], size: int, *, draws: int = DRAWS, seed: int = 42
) -> tuple[float, float]:
    """Mean and standard deviation (population) of the majority's value among ``size`` answers drawn with replacement.

    Over ``draws`` draws from a generator of its own with this seed, so it is the same every time.
    """
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(votes), (draws, size), generator=generator).tolist()
    found = [majority_value([votes[i] for i in pick], [values[i] for i in pick]) for pick in picks]
    return statistics.fmean(found), statistics.pstdev(found)


def sample_statistics(values: Sequence[float], votes: Sequence[Hashable] | None = None) -> dict[str, float]:
    """One prompt's mean@N and std@N (population) and, for subsets of k = 2, 4, ..., N answers, best@k, worst@k and with
    votes maj@k, each with /mean and /std. For a single answer its value alone, as mean@1.

    Source: the names are verl's.
    """
    count = len(values)
    found = {f"mean@{count}": statistics.fmean(values)}
    if count > 1:
        found[f"std@{count}"] = statistics.pstdev(values)
    for size in subset_sizes(count):
        pairs = {"best": best_of(values, size), "worst": worst_of(values, size)}
        if votes is not None:
            pairs["maj"] = majority_of(votes, values, size)
        for name, (mean, std) in pairs.items():
            found |= {f"{name}@{size}/mean": mean, f"{name}@{size}/std": std}
    return found


def mean_over_prompts(prompts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every statistic over the prompts that have it (those with other numbers of answers do not)."""
    gathered: dict[str, list[float]] = defaultdict(list)
    for found in prompts:
        for name, value in found.items():
            gathered[name].append(value)
    return {name: statistics.fmean(values) for name, values in gathered.items()}
