"""Times of tasks."""

from __future__ import annotations

from .order import ordered


def ends(before: dict[str, list[str]], hours: dict[str, int]) -> dict[str, int]:
    """Return the earliest hour at which every task can have ended, when any number are done at once."""
    found: dict[str, int] = {}
    for task in ordered(before):
        begin = max((found[needed] for needed in before[task]), default=0)
        found[task] = begin + hours[task]
    return found


def spare(before: dict[str, list[str]], hours: dict[str, int]) -> dict[str, int]:
    """Return the hours by which every task may be late without the whole plan ending later."""
    early = ends(before, hours)
    last = max(early.values())
    late = dict.fromkeys(before, last)
    for task in reversed(ordered(before)):
        for needed in before[task]:
            late[needed] = min(late[needed], late[task] - hours[task])
    return {task: late[task] - early[task] for task in sorted(before)}


def busy(before: dict[str, list[str]], hours: dict[str, int], hour: int) -> list[str]:
    """List the tasks that are being done in an hour, the first of which is 0, when each begins as early as it can."""
    early = ends(before, hours)
    return sorted(task for task in before if early[task] - hours[task] <= hour < early[task])
