"""Tasks in an order: {task: [tasks before it]}."""

from __future__ import annotations


def ordered(before: dict[str, list[str]]) -> list[str]:
    """Order tasks so that each comes behind those before it; of several that could be next, the first by name.

    Raises: ValueError when tasks wait for each other, KeyError for one that waits for an unknown task.
    """
    for needed in before.values():
        for task in needed:
            if task not in before:
                raise KeyError(task)
    done: list[str] = []
    while len(done) < len(before):
        ready = [task for task in sorted(before) if task not in done and all(needed in done for needed in before[task])]
        if not ready:
            raise ValueError("tasks wait for each other")
        done.append(ready[0])
    return done


def all_before(before: dict[str, list[str]], task: str) -> list[str]:
    """List all tasks that must be done before one, by name."""
    found: set[str] = set()
    waiting = list(before[task])
    while waiting:
        needed = waiting.pop()
        if needed not in found:
            found.add(needed)
            waiting += before[needed]
    return sorted(found)
