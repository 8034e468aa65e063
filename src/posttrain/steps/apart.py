"""Sample apart from training: samplers with weights of their own go on while a step trains, and get new weights in between.

A thread keeps the samplers at work and alone touches the groups; the loop asks it for a step's groups, and to let the samplers
rest between two tokens while their weights change. A decision depends on when responses end, so two runs differ; each order is
recorded with the number of passes after which its sampler took it, and a run that is replayed gives the same orders at the
same passes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.asynchrony.ledger import Ledger
from posttrain.asynchrony.passes import Awaited
from posttrain.asynchrony.pending import Entry
from posttrain.asynchrony.script import Script
from posttrain.errors import RunStopped
from posttrain.interfaces.crew import Crew
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.records.plans import StepPlan
from posttrain.steps.fleet import Fleet
from posttrain.steps.open_groups import DIFFERS, Drops, OpenGroups, Snapshot, StepEnd
from posttrain.steps.own_thread import OwnThread
from posttrain.steps.rl_step import AnySelection, selection_of

POLL_S = 0.02  # between two looks of the loop for a step's groups


class Apart:
    """The groups of a run whose samplers work apart; ``sample`` gives those of a step. See interfaces.weight_sync.WeightSync for
    ``publish`` and ``sent_bytes``: it ends a step, too."""

    folder: Path | None = None  # see run.progress.AheadOfTraining

    def __init__(
        self,
        groups: OpenGroups,
        crew: Crew,
        policy: TrainEngine,
        loader: PromptLoader,
        *,
        sync_every_steps: int,
        sync_between_tokens: bool = True,
        wait_timeout_s: float,
        script: Script | None = None,
    ):
        passes = script.passes if script else None
        self._ended = StepEnd(Drops(), 0, 0, 0)  # of the last step
        self.sent_bytes = 0
        self._groups, self._crew, self._policy, self._loader = groups, crew, policy, loader
        groups.flying.follows = script is not None
        self._every, self._script = sync_every_steps, script
        self._number = 0  # of the step under way
        self._resumed = False  # from a checkpoint, since the last step
        self._rounds: list[list[int]] = []  # its recorded choices that are still to be made
        self._choices = 0  # that it has made
        self._served = -1  # version
        self._told = 0  # tokens that the loop has shown
        self._epochs = loader.epochs
        self._since = (0, 0.0, time.monotonic())  # tokens, busy seconds and time at the end of the last step
        self._fleet = Fleet(
            crew,
            groups.sampling_of(1),
            hear=groups.hear,
            record=self._record,
            finishes=not (sync_between_tokens and crew.resumes),
            again=passes,
        )
        self._thread = OwnThread("the thread of the samplers", self._work, wait_timeout_s)

    @property
    def ledger(self) -> Ledger:
        return self._groups.ledger

    @property
    def consumed(self) -> Sequence[Entry]:
        return self._groups.consumed

    @property
    def marks(self) -> Mapping[int, str]:
        """Return the marks of the samples of these groups, by serial (records.marks)."""
        return self._groups.marks

    @property
    def late(self) -> set[int]:
        return self._groups.late

    @property
    def sampled_tokens(self) -> int:
        return self._ended.sampled_tokens

    @property
    def epochs(self) -> float:
        """Passes over the data at the end of the last step."""
        return self._epochs

    # ------------------------------------------------------------------------------------------------- the loop asks

    def sample(self, number: int, plan: StepPlan, clock: PhaseClock) -> AnySelection:
        """The groups of step ``number``, scored; with a filter that refills, sampled until enough pass.

        Raises: RunStopped when the filter's limit of batches is reached, nothing is sampled within the time for it, or no
            sampler is left.
        """
        self._thread.ask(lambda: self._begin_step(number))
        self._thread.start()
        selection = selection_of(plan)
        while not selection.complete:
            with clock.phase("rollout"):
                chosen = self._wait_for_groups(number, clock)
            with clock.phase("reward"):
                scored = self._groups.scored(chosen, plan)
                selection.add(scored)
            self._thread.ask(partial(self._groups.take, chosen, scored, selection))
        return selection

    def before_sync(self) -> None:
        """No-op: ``publish`` lets the samplers rest."""

    def publish(self, policy: TrainEngine, rollout: RolloutEngine) -> None:
        """A step has been trained: it ends, and the samplers get its weights where that is due. Before the first step they get
        the starting weights.

        Raises: RunStopped when a sampler serves other weights, none is left, or they do not come to rest in time.
        """
        if self._number == 0:
            self._send()
            return
        due = self._number % self._every == 0 or bool(self._crew.joiners) or not self._fleet.samplers
        if self._script and self._script.passes:
            due = self._number in self._script.passes.synced
        if not due:
            # Dropped requests are withdrawn at a recorded pass: a replay would not find others there.
            drops = bool(self._thread.ask(lambda: self.ledger.outdated))
            with self._at_rest() if drops else nullcontext():
                self._thread.ask(lambda: self._end_step(synced=False))
            return
        with self._at_rest():
            self._send()
            self._record("synced")
            self._end_step(synced=True)

    def end_step(self) -> StepEnd:
        """Return the end of the step, which ``publish`` was."""
        return self._ended

    @contextmanager
    def validating(self) -> Iterator[None]:
        """A block in which the samplers are free for other prompts, with the trainer's present weights."""
        with self._at_rest():
            if self._served != self._policy.version:
                self._send()
                self.ledger.sync()
            yield

    @contextmanager
    def still(self) -> Iterator[None]:
        """A block in which nothing changes here; the samplers finish their turns."""
        self._thread.pause(lambda: True, lambda: "a turn of a sampler")
        try:
            yield
        finally:
            self._thread.go()

    def close(self) -> None:
        """End the thread."""
        self._thread.stop()

    def _wait_for_groups(self, number: int, clock: PhaseClock) -> Sequence[Entry]:
        while True:
            chosen = self._thread.ask(self._choice)
            tokens = self._fleet.tokens
            clock.advance(tokens - self._told)  # also without any: the step may be left
            self._told = tokens
            if chosen is not None:
                return chosen
            if self._script is None and (self._crew.joiners or not self._fleet.samplers):
                self._take_in(clock)
            elif self._script and self._thread.ask(lambda: self._fleet.takes_in(self._awaited)):
                self._take_in(clock)  # as the recorded run did here
            self._groups.check_heard(number)
            time.sleep(POLL_S)

    def _take_in(self, clock: PhaseClock) -> None:
        """Give new samplers the trainer's weights while it waits for responses; the others get them with these."""
        if not self._fleet.samplers and self._script is None:
            self._crew.wait_for_joiner()
        with clock.phase("weight_sync"), self._at_rest():
            self._send()
            self.ledger.sync()

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """A block in which the samplers rest between two tokens, and the thread pauses."""
        self._thread.pause(self._fleet.at_rest, lambda: self._fleet.named)
        try:
            yield
        finally:
            self._fleet.go()
            self._groups.hear()
            self._thread.go()

    def _send(self) -> None:
        while True:
            served = self._crew.publish(self._policy)
            self._fleet.served(served.version, served.content_hash)
            if self._fleet.samplers:
                break
            self._crew.wait_for_joiner()
        self._served, self.sent_bytes = served.version, served.nbytes

    # ----------------------------------------------------------------------------------------------- the thread works

    def _work(self) -> None:
        if self._script:
            self._admit_again(self._script)
        else:
            while self.ledger.room():
                self._groups.admit()
        for place, trajectory in self._groups.flying.poll(self._fleet):
            self._groups.end(place, trajectory)

    def _admit_again(self, script: Script) -> None:
        """Admit all that the recorded run had admitted by the end of this step: its samplers' orders name them."""
        step = self.ledger.steps + 1
        recorded = [each for turn in script.rounds.get(step, []) for each in turn.admitted]
        for each in recorded:
            if each.serial >= self.ledger.admitted:
                self._groups.admit_again(each, step)

    def _begin_step(self, number: int) -> None:
        self._number = number
        if self._resumed:
            self._record("resumed")
        self._resumed = False
        self._groups.begin_step(number)
        self._groups.hear()
        self._choices = 0
        self._rounds = [each.chosen for each in self._script.rounds.get(number, [])] if self._script else []

    def _choice(self) -> Sequence[Entry] | None:
        if self._script is None:
            chosen = self.ledger.choice()
        elif not self._rounds:
            raise RunStopped(f"{DIFFERS} in step {self._number}, which needs more groups than it had")
        else:
            # Environments that answer sooner now must not let the step begin before a sampler has joined.
            if self._fleet.will_take_in(self._awaited) or not self._groups.complete(self._rounds[0]):
                return None
            chosen = self._groups.chosen_again(self._rounds.pop(0), self._number)
        if chosen is not None:
            self._choices += 1
            self._record("ready")
        return chosen

    @property
    def _awaited(self) -> Awaited:
        return Awaited(self._number, self._choices)

    def _end_step(self, *, synced: bool) -> None:
        now, fleet = time.monotonic(), self._fleet
        tokens, busy_s, before = self._since
        self._since = fleet.tokens, fleet.busy_s, now
        self._keep_progress()
        drops = self._groups.end_step(synced=synced)
        fleet.cancel_groups(drops.groups)
        self._epochs = self._loader.epochs
        self._ended = StepEnd(
            drops,
            fleet.tokens - tokens,
            len(self.ledger.pending),
            len(self.ledger.running),
            {
                "async/sampler_busy_share": (fleet.busy_s - busy_s) / max((now - before) * fleet.samplers, 1e-9),
                "async/samplers": float(fleet.samplers),
                "async/lost_samplers": float(fleet.lost),
            },
        )

    def _record(self, event: str, sampler: int | None = None, values: Mapping[str, Any] | None = None) -> None:
        where = {} if sampler is None else {"sampler": sampler}
        self.ledger.record({"step": self.ledger.steps + 1, "event": event, **where, **(values or {})})

    # ---------------------------------------------------------------------------------------------- between two steps

    def snapshot(self) -> Snapshot:
        self._keep_progress()
        return self._groups.snapshot()

    def go_back(self, snapshot: Snapshot) -> None:
        """Undo a step that was left before its update: the run ends, with what was there before the step."""
        self._thread.stop()
        self._groups.go_back(snapshot)

    def start_after(self, step: int) -> None:
        """Start with nothing sampled, after the steps of a synchronous run."""
        self._groups.start_after(step)

    def state(self) -> dict[str, Any]:
        """Plain values from which ``restore`` resumes."""
        self._keep_progress()
        return self._groups.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises: RunStopped when the saved groups do not fit into the bounds of this run."""
        self._groups.restore(state)
        self._resumed, self._epochs = True, self._loader.epochs

    def _keep_progress(self) -> None:
        for each in self._fleet.progress():
            self._groups.flying.keep(each)
