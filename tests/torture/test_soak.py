"""A long run does not grow."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from runs import tiny_run

from posttrain.build.train import train_run
from posttrain.run.trackers import Trackers


@pytest.mark.slow
def test_memory_files_and_threads_of_300_steps(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured after each step. Between step 100, when all caches are warm, and the end: the same files and threads, and
    less than 5 % more memory (a leak of one tiny batch of tensors a step would be about that)."""
    log, seen = Trackers.log, {}

    def measured(self: Trackers, step: int, metrics: Mapping[str, float]) -> None:
        log(self, step, metrics)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen[step] = (
            pages,
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(os.listdir("/proc/self/task")),
        )

    monkeypatch.setattr(Trackers, "log", measured)
    train_run(tiny_run(tmp_path, tiny_llama, "run", steps=300, checkpoint={"every_steps": 10, "keep_last": 2}))
    early, late = seen[100], seen[300]
    assert late[1:] == early[1:]
    assert late[0] < 1.05 * early[0], f"{early[0] * 4 // 1024} MiB after 100 steps, {late[0] * 4 // 1024} MiB after 300"
