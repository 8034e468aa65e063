"""Profiles of chosen phases of chosen steps: what torch did, and how a GPU's memory was used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from posttrain.interfaces.roles import WorkersProfiler
from posttrain.records.plans import ProfilePlan

MOST_MEMORY_EVENTS = 100_000  # allocations that a snapshot of memory remembers, the last ones


class Profiler:
    """Writes ``profiles/step_3_update.json.gz`` in the run folder, a Chrome trace of torch's operators (ui.perfetto.dev shows
    it), and ``profiles/step_3_update.memory.pickle``, a snapshot of a GPU's memory (docs.pytorch.org/memory_viz shows it).

    It sees what happens in this process, and with ``workers`` has them write files of their own. A phase that is recorded is
    slower, and its events are held in memory until it ends. A profile that cannot be made or written is reported to
    ``say``; it never ends a run.
    """

    def __init__(
        self, plan: ProfilePlan, run_folder: Path, say: Callable[[str], None], workers: WorkersProfiler | None = None
    ):
        self._plan = plan
        # Workers may have another working folder
        self._folder = (plan.folder or run_folder / "profiles").resolve()
        self._say = say
        self._workers = workers
        self._recording = Recording()
        if plan.memory and not (workers.on_cuda if workers else torch.cuda.is_available()):
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
        stem = f"step_{step}_{name}{number}"
        if self._workers:
            self._workers.begin(name, self._plan)
        self._recording.begin(self._plan)
        try:
            yield
        except BaseException:  # workers drop what they have when they begin again; the run ends before
            self._recording.drop()
            raise
        messages = self._recording.end(self._folder, stem)
        if self._workers:
            messages += self._workers.end(self._folder, stem)
        for text in messages:
            self._say(text)


class Recording:
    """A recording of torch between ``begin`` and ``end``, in the thread that calls both and those that work for it."""

    def __init__(self) -> None:
        self._operators: profile | None = None
        self._memory = False

    def begin(self, plan: ProfilePlan) -> None:
        """An earlier recording that was not ended is dropped."""
        self.drop()
        on_cuda = torch.cuda.is_available()
        if plan.memory and on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=MOST_MEMORY_EVENTS)
            self._memory = True
        if plan.operators:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
            self._operators = profile(activities=activities, record_shapes=plan.shapes, with_stack=plan.stacks)
            self._operators.start()

    def end(self, folder: Path, stem: str) -> list[str]:
        """Write ``folder/stem.json.gz`` and ``stem.memory.pickle``, as far as recorded. Returns messages for the user."""
        messages = []
        try:
            if self._operators:
                self._operators.stop()
                messages.append(_written(folder / f"{stem}.json.gz", self._operators.export_chrome_trace))
                self._operators = None
            if self._memory:
                messages.append(_written(folder / f"{stem}.memory.pickle", torch.cuda.memory._dump_snapshot))
        finally:
            self.drop()
        return messages

    def drop(self) -> None:
        operators, self._operators = self._operators, None
        if operators:
            operators.stop()
        if self._memory:
            self._memory = False
            torch.cuda.memory._record_memory_history(enabled=None)


def _written(path: Path, write: Callable[[str], None]) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(path))
    except (OSError, RuntimeError) as error:
        return f"the profile {path} could not be written: {error}"
    return f"profiled: {path}"
