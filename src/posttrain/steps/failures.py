"""Responses without a valid reward, as an error names them: how many of every reason, and examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from posttrain.records.trajectories import Invalid, ScoredGroup

Failure = tuple[str, Invalid]  # of a sample id
MOST = 10  # examples


def failures_of(groups: Sequence[ScoredGroup]) -> list[Failure]:
    """Return the responses of scored groups that have no valid reward, in order."""
    return [
        (trajectory.sample_id, outcome)
        for group in groups
        for trajectory, outcome in group.pairs
        if isinstance(outcome, Invalid)
    ]


def counted(failures: Sequence[Failure]) -> str:
    """Return the reasons with their numbers, the most frequent first: ``timeout 3, exception 1``."""
    counts = Counter(failure.reason for _, failure in failures)
    return ", ".join(f"{reason} {count}" for reason, count in counts.most_common())


def examples(failures: Sequence[Failure]) -> str:
    """Return a line for each of up to MOST different failures, which names the first sample that has it."""
    alike = Counter((failure.reason, failure.detail) for _, failure in failures)
    first = {(failure.reason, failure.detail): sample_id for sample_id, failure in reversed(failures)}
    return "\n".join(
        f"  {_named(first[each], alike[each])}: {': '.join(each)}" for each in _of_every_reason(alike)[:MOST]
    )


def _named(sample_id: str, count: int) -> str:
    return sample_id if count == 1 else f"{sample_id} and {count - 1} more"


def _of_every_reason(failures: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Order different failures (reason, detail): the first of every reason, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    ranked = []
    for reason, detail in failures:
        ranked.append((seen[reason], reason, detail))
        seen[reason] += 1
    return [(reason, detail) for _, reason, detail in sorted(ranked, key=lambda each: each[0])]
