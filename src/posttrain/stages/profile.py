"""Profiles of chosen phases of chosen steps: what torch did, and how a GPU's memory was used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from posttrain.records.plans import ProfilePlan

MOST_MEMORY_EVENTS = 100_000  # allocations that a snapshot of memory remembers, the last ones


class Profiler:
    """Writes ``profiles/step_3_update.json.gz`` in the run folder, a Chrome trace of torch's operators (ui.perfetto.dev shows
    it), and ``profiles/step_3_update.memory.pickle``, a snapshot of a GPU's memory (docs.pytorch.org/memory_viz shows it).

    It sees what happens in this process. A phase that is recorded is slower, and its events are held in memory until it ends.
    A profile that cannot be made or written is told to ``say``; it never ends a run.
    """

    def __init__(self, plan: ProfilePlan, run_folder: Path, say: Callable[[str], None]):
        self._plan = plan
        self._folder = plan.folder or run_folder / "profiles"
        self._say = say
        self._on_cuda = torch.cuda.is_available()
        if plan.memory and not self._on_cuda:
            say("profiling.memory has no effect: torch sees no CUDA device on this machine")
        self._times: Counter[tuple[int, str]] = Counter()  # a step may have the same phase several times

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Record what happens inside, if it is to be; a phase that is left by an exception leaves no profile."""
        if not self._plan.covers(step, name):
            yield
            return
        self._times[step, name] += 1
        number = f"_{self._times[step, name]}" if self._times[step, name] > 1 else ""
        file = self._folder / f"step_{step}_{name}{number}"
        snapshot = self._plan.memory and self._on_cuda
        if snapshot:
            torch.cuda.memory._record_memory_history(max_entries=MOST_MEMORY_EVENTS)
        try:
            if self._plan.operators:
                activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
                with profile(
                    activities=activities, record_shapes=self._plan.shapes, with_stack=self._plan.stacks
                ) as recorded:
                    yield
                self._write(file.with_name(f"{file.name}.json.gz"), recorded.export_chrome_trace)
            else:
                yield
            if snapshot:
                self._write(file.with_name(f"{file.name}.memory.pickle"), torch.cuda.memory._dump_snapshot)
        finally:
            if snapshot:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, path: Path, write: Callable[[str], None]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
        except (OSError, RuntimeError) as error:
            self._say(f"the profile {path} could not be written: {error}")
        else:
            self._say(f"profiled: {path}")
