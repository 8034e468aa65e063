"""Several answers to one held-out prompt: what the mean, the best, the worst and the majority of them are worth."""

from __future__ import annotations

import math
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
    if len(set(values)) == 1:
        return values[0], 0.0
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(votes), (draws, size), generator=generator)  # answers, by number
    numbers = {vote: number for number, vote in enumerate(dict.fromkeys(votes))}
    drawn = torch.tensor([numbers[vote] for vote in votes])[picks]  # [draws, size], votes by number
    counts = torch.zeros(draws, len(numbers), dtype=torch.int64).scatter_add_(1, drawn, torch.ones_like(drawn))
    # How often each drawn answer's vote was drawn; the first place with the most is majority_value's answer.
    winners = counts.gather(1, drawn).argmax(dim=1, keepdim=True)
    found = torch.tensor(list(values), dtype=torch.float64)[picks.gather(1, winners).squeeze(1)]
    return found.mean().item(), found.std(correction=0).item()


def pass_at(right: int, samples: int, size: int) -> float:
    """Chance that among ``size`` of ``samples`` answers, drawn without replacement, at least one of the ``right`` ones is.

    1 - C(samples - right, size) / C(samples, size), which estimates without bias the pass@size of a sampler from which
    ``samples`` answers were drawn. Needs size <= samples.

    Source: M. Chen et al., "Evaluating Large Language Models Trained on Code", 2021 (arXiv:2107.03374), equation 1.
    """
    if not 0 <= right <= samples or not 1 <= size <= samples:
        raise ValueError(f"pass@{size} of {right} right among {samples}")
    return 1 - math.comb(samples - right, size) / math.comb(samples, size)


def sample_statistics(
    values: Sequence[float], votes: Sequence[Hashable] | None = None, samples: int | None = None
) -> dict[str, float]:
    """One prompt's mean@N and std@N (population) and, for subsets of k = 2, 4, ..., N answers, best@k, worst@k and with
    votes maj@k, each with /mean and /std. For a single answer its value alone, as mean@1.

    Args: ``samples`` is N where fewer than N answers have a value; subsets are drawn with replacement from those that have.
    Source: the names are verl's.
    """
    count = len(values) if samples is None else samples
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


def bootstrap_intervals(
    prompts: Sequence[Mapping[str, float]], *, draws: int, confidence: float, seed: int
) -> dict[str, tuple[float, float]]:
    """Percentile bootstrap: for the mean over prompts of every statistic, the interval that holds ``confidence`` of its values
    when the prompts are resampled with replacement. None for a statistic that a single prompt has.

    Args: ``prompts`` as for ``mean_over_prompts``; ``draws`` times all prompts are drawn, from a generator with this seed.
    Source: B. Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979; percentiles interpolated linearly.
    """
    names = sorted({name for found in prompts for name in found})
    if not names or not draws:
        return {}
    values = torch.tensor([[found.get(name, 0.0) for name in names] for found in prompts], dtype=torch.float64)
    there = torch.tensor([[float(name in found) for name in names] for found in prompts], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    found = torch.empty(draws, len(names), dtype=torch.float64)
    at_once = max(1, 4_000_000 // len(prompts))  # draws whose counts fit into some 32 MB
    for start in range(0, draws, at_once):
        shape = (min(at_once, draws - start), len(prompts))
        picks = torch.randint(len(prompts), shape, generator=generator)
        counts = torch.zeros(shape, dtype=torch.float64).scatter_add_(1, picks, torch.ones(shape, dtype=torch.float64))
        # 0 / 0 where a draw holds no prompt with the statistic
        found[start : start + len(picks)] = counts @ values / (counts @ there)
    bounds = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    several = there.sum(dim=0) > 1
    # One statistic at a time, because sorting takes several times the memory of what is sorted.
    intervals = {name: found[:, index].nanquantile(bounds) for index, name in enumerate(names) if bool(several[index])}
    return {name: (low.item(), high.item()) for name, (low, high) in intervals.items()}
