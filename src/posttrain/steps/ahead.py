"""Sample ahead of training: a step takes the groups that are complete, and unfinished responses continue under newer weights.

Responses are sampled until the ledger has a step's groups. Then the sampler stops between two tokens: what is unfinished is kept
as token ids, and continues in the next step from there, its keys and values computed with the new weights. Between two steps
everything but environments is therefore a plain value, which a checkpoint holds and from which a resumed run continues bit for
bit. Decisions depend on the order in which responses end, counted in passes of the sampler, and not on seconds; only the answers
of environments come when they come.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from posttrain.asynchrony.ledger import Ledger
from posttrain.asynchrony.passes import PostScript
from posttrain.asynchrony.pending import Entry
from posttrain.asynchrony.script import Round, Script
from posttrain.errors import RunStopped
from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.interfaces.rollout_engine import ResumableStream, RolloutEngine
from posttrain.records.plans import StepPlan
from posttrain.steps.in_flight import Cut
from posttrain.steps.noted_stream import FollowingStream, NotedStream
from posttrain.steps.open_groups import DIFFERS, OpenGroups, Snapshot, StepEnd
from posttrain.steps.rl_step import AnySelection, selection_of


class Ahead:
    """The groups of a run whose sampling runs ahead of training; ``sample`` gives those of a step."""

    folder: Path | None = None  # see run.progress.AheadOfTraining

    def __init__(self, groups: OpenGroups, rollout: RolloutEngine, script: Script | None = None):
        self.sampled_tokens = 0  # in the step under way
        self.idle_s = 0.0  # of it, in which only environments were at work
        self._groups, self._rollout = groups, rollout
        groups.flying.follows = script is not None
        self._script = script
        self._rounds: list[Round] = []  # of the step under way, when decisions are made again

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

    def sample(self, number: int, plan: StepPlan, clock: PhaseClock) -> AnySelection:
        """The groups of step ``number``, scored; with a filter that refills, sampled until enough pass.

        Raises: RunStopped when the filter's limit of batches is reached, or nothing is sampled within the time for it.
        """
        self.sampled_tokens, self.idle_s = 0, 0.0
        self._groups.begin_step(number)
        self._rounds = list(self._script.rounds.get(number, [])) if self._script else []
        selection = selection_of(plan)
        while not selection.complete:
            with clock.phase("rollout"):
                chosen = self._sample_until_ready(number, clock)
            with clock.phase("reward"):
                scored = self._groups.scored(chosen, plan)
                selection.add(scored)
            self._groups.take(chosen, scored, selection)
        return selection

    def before_sync(self) -> None:
        """No-op: nothing is being sampled while the weights change."""

    def end_step(self) -> StepEnd:
        """The step has been trained: groups that are past the bound are dropped, with ``drop``."""
        drops = self._groups.end_step()
        pending, running = len(self.ledger.pending), len(self.ledger.running)
        return StepEnd(drops, self.sampled_tokens, pending, running, idle_s=self.idle_s)

    def validating(self) -> AbstractContextManager[None]:
        """No-op: the sampler is free between two steps."""
        return nullcontext()

    def close(self) -> None:
        """No-op: nothing goes on."""

    # --------------------------------------------------------------------------------------------------- one step

    def _sample_until_ready(self, number: int, clock: PhaseClock) -> Sequence[Entry]:
        groups = self._groups
        again = self._next_round(number)
        if again and not again.samples:
            self._note("ready", {})
            return groups.chosen_again(again.chosen, number)
        if not again and (chosen := self.ledger.choice()) is not None:
            self._note("ready", {})
            return chosen

        def on_tokens(tokens: int) -> None:
            self.sampled_tokens += tokens
            groups.hear()
            clock.advance(tokens)

        groups.hear()
        sampling = groups.sampling_of(1)  # each request has the seed of its own draw
        with self._rollout.open_stream(sampling, on_tokens) as opened:
            resumable = cast(ResumableStream, opened)
            if again:
                cuts = self._follow(
                    FollowingStream(resumable, self._note, PostScript(again.orders)), again, number, clock
                )
            else:
                cuts = self._lead(NotedStream(resumable, self._note), number, clock)
        for cut in cuts:
            self._note_cut(cut)
        if again:
            return groups.chosen_again(again.chosen, number)
        chosen = self.ledger.choice()
        assert chosen is not None, "suspending sampling changes nothing"
        return chosen

    def _lead(self, stream: NotedStream, number: int, clock: PhaseClock) -> Sequence[Cut]:
        """Sample until the ledger has a choice. Returns: what is cut."""
        groups, flying = self._groups, self._groups.flying
        flying.resume()
        while self.ledger.choice() is None:
            while groups.may_admit(stream.slots):
                groups.admit()
            groups.prepare()
            self._turn(stream, number, clock)
        return flying.suspend(stream)

    def _follow(self, stream: FollowingStream, again: Round, number: int, clock: PhaseClock) -> Sequence[Cut]:
        """Sample as the recorded run did, and on with what only environments have to end: also groups of a later step, which it
        may take without any sampling. Returns: what is cut.

        Raises: RunStopped when it does not come out as recorded.
        """
        groups, flying = self._groups, self._groups.flying
        flying.resume()
        for admission in again.admitted:
            groups.admit_again(admission, number)
        ended = {*again.finished, *again.chosen}
        try:
            while not stream.rests or (flying.waits and not groups.complete(ended)):
                self._turn(stream, number, clock)
        except RunStopped as error:
            raise RunStopped(f"{DIFFERS} in step {number}: {error}") from None
        cuts = flying.suspend(stream)
        for cut in cuts:
            recorded = again.cuts.get((cut.place.serial, cut.place.number), cut.tokens)
            if recorded != cut.tokens:
                raise RunStopped(
                    f"{DIFFERS} in step {number}: sample {cut.place.number} of group {cut.place.serial} has {cut.tokens} "
                    f"tokens at its end, and had {recorded}"
                )
        return cuts

    def _turn(self, stream: NotedStream, number: int, clock: PhaseClock) -> None:
        """Sample for a while, and take in what has ended."""
        groups, flying = self._groups, self._groups.flying
        clock.advance(0)  # the step may be left while only environments are at work
        began = None if flying.samples else time.monotonic()
        for place, trajectory in flying.poll(stream):
            groups.end(place, trajectory)
        groups.check_heard(number)
        if began is not None:
            self.idle_s += time.monotonic() - began

    def _next_round(self, number: int) -> Round | None:
        if self._script is None:
            return None
        if not self._rounds:
            raise RunStopped(f"{DIFFERS} in step {number}, which needs more groups than it had")
        return self._rounds.pop(0)

    def _note(self, event: str, values: Mapping[str, Any]) -> None:
        self.ledger.record({"step": self.ledger.steps + 1, "event": event, **values})

    def _note_cut(self, cut: Cut) -> None:
        """Record that a sample stops here until the next step."""
        where = {"group": cut.place.serial, "sample": cut.place.number, "turn": cut.turn, "token": cut.tokens}
        self._note("cut", where | {"version": self._rollout.version})

    # ---------------------------------------------------------------------------------------------- between two steps

    def still(self) -> AbstractContextManager[None]:
        """No-op: between two steps nothing is sampled."""
        return nullcontext()

    def snapshot(self) -> Snapshot:
        return self._groups.snapshot()

    def go_back(self, snapshot: Snapshot) -> None:
        """Undo a step that was left before its update."""
        self._rounds = []
        self._groups.go_back(snapshot)

    def start_after(self, step: int) -> None:
        """Start with nothing sampled, after the steps of a synchronous run."""
        self._groups.start_after(step)

    def state(self) -> dict[str, Any]:
        """Plain values from which ``restore`` resumes."""
        return self._groups.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises: RunStopped when the saved groups do not fit into the bounds of this run."""
        self._groups.restore(state)
