"""Sample one step ahead: the next step's groups are sampled by the weights that this step starts with, while it trains.

Where sampling would disturb training, because the sampler reads the trainer's own weights or shares its devices, they are
sampled before the update instead: the numbers are the same.

A stop that is requested while the step updates its weights does not wait for the next step's batch: its sampling is left, and the
batch is owed. The checkpoint holds the weights that the samplers have, and the resumed run samples the whole batch with them.
Draws depend on seed and sample, so it is the same batch.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from posttrain.asynchrony.ledger import Bounds, Ledger
from posttrain.asynchrony.pending import Entry
from posttrain.errors import RunStopped
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.records.marks import mark_of
from posttrain.records.plans import StepPlan
from posttrain.records.prompts import Prompt
from posttrain.records.saved_groups import scored_from_plain, scored_to_plain
from posttrain.records.trajectories import ScoredGroup, TrajectoryGroup
from posttrain.steps.domains import DomainSelection
from posttrain.steps.open_groups import Drops, StepEnd
from posttrain.steps.rl_step import AnySelection, collect, respond, sample_groups
from posttrain.steps.select import Selection

LANE = "sampler"  # of the clock, while the loop trains
LOOK_S = 0.1  # between two looks for a sampler that needs weights
LEAVE_S = 10.0  # for a thread to end that is no longer needed

Collect = Callable[..., list[TrajectoryGroup]]
OneStepSnapshot = tuple[Mapping[str, Any], AnySelection | None, bool, tuple[float, float]]


class OneStepAhead:
    """The groups of every step, sampled during the step before; ``sample`` gives those of a step.

    Args: prompts of the run, by id; plan_of(step); in_thread, the sampler works while the loop trains; folder, for the weights
        of a batch that is owed (see run.progress.AheadOfTraining); kept(step, collect) returns the ``collect`` of a step whose
        responses may be kept from before.
    """

    def __init__(
        self,
        roles: Roles,
        scorer: GroupScorer,
        loader: PromptLoader,
        prompts: Mapping[str, Prompt],
        bounds: Bounds,
        plan_of: Callable[[int], StepPlan],
        *,
        in_thread: bool,
        wait_timeout_s: float,
        folder: Path,
        kept: Callable[[int, Collect], Collect] = lambda step, collect: collect,
    ):
        self._kept = kept
        self.ledger = Ledger(bounds)
        self.sampled_tokens = 0  # in the step under way
        self.consumed: list[Entry] = []  # by the step under way
        self.marks: dict[int, str] = {}  # of these, by serial (records.marks)
        self.late: set[int] = set()  # it takes whole batches, and waits for all of each
        self._roles, self._scorer, self._loader, self._prompts = roles, scorer, loader, prompts
        self._plan_of, self._in_thread, self._wait_timeout_s = plan_of, in_thread, wait_timeout_s
        self.folder: Path | None = folder
        self._next: AnySelection | None = None  # of the next step
        self._owed = False  # that batch was to be sampled during the step before, which a stop has prevented
        self._position: Mapping[str, Any] = {}  # in the data, when its sampling began
        self.epochs = self._next_epochs = (
            loader.epochs
        )  # passes over the data with the step under way, and with the next one
        self._sampling: Future[AnySelection] | None = None
        self._clock: PhaseClock | None = None

    def sample(self, number: int, plan: StepPlan, clock: PhaseClock) -> AnySelection:
        """The groups of step ``number``; the sampling of the next step's begins."""
        self.sampled_tokens, self._clock = 0, clock
        if self._owed:
            self._sample_owed(number, plan, clock)
        selection = self._next or self._sample(number, plan, clock)
        if self._next is None:
            self._admit(selection)
        self._next, self.epochs = None, self._next_epochs
        self.consumed = list(self.ledger.pending)
        marks = [mark_of(each) for each in once(selection.groups)]
        self.marks = {entry.serial: mark for entry, mark in zip(self.consumed, marks, strict=True)}
        self.ledger.take(self.consumed, self.marks, marks=self.marks)
        if number < self.ledger.bounds.total_steps:
            following = self._plan_of(number + 1)
            if self._in_thread:
                self._position = self._loader.state()
                self._begin(number + 1, following, clock.in_lane(LANE), self._roles.policy.version)
            else:
                self._have_next(self._sample(number + 1, following, clock))
        return selection

    def before_sync(self) -> None:
        """Wait for the sampler: it changes its weights between two batches. Once a stop was requested it leaves its batch.

        Raises: what sampling raised; RunStopped when it does not end in time.
        """
        if self._sampling is None:
            return
        assert self._clock is not None
        with self._clock.phase("sampler_wait"):
            sampling = self._ended(self._sampling, "this step's updates")
            if sampling.exception() is not None and self._clock.stopping:
                self._owe()
            else:
                self._have_next(sampling.result())

    def end_step(self) -> StepEnd:
        """The step has been trained. Nothing is ever dropped."""
        self.ledger.end_step()
        return StepEnd(Drops(), self.sampled_tokens, len(self.ledger.pending), 0)

    def validating(self) -> AbstractContextManager[None]:
        """No-op: the sampler is free between two steps."""
        return nullcontext()

    def close(self) -> None:
        """Leave the sampling that is under way, so that the workers may end; with servers its thread ends with its batch."""
        if self._sampling is not None and self._roles.beside:
            self._roles.beside.leave()
            wait([self._sampling], LEAVE_S)

    def _sample(self, number: int, plan: StepPlan, clock: PhaseClock, collected_by: Collect = collect) -> AnySelection:
        kept = self._kept(number, collected_by)
        selection = sample_groups(self._roles, self._scorer, self._loader, plan, clock, collected_by=kept)
        self.sampled_tokens += selection.sampled_tokens
        self._next_epochs = self._loader.epochs
        return selection

    def _begin(self, number: int, plan: StepPlan, clock: PhaseClock, held: int) -> None:
        """Sample in a thread; a pool would hold up the end of the process. Args: held, the version that the step before
        starts with."""
        result = self._sampling = Future[AnySelection]()

        def collected(roles: Roles, *asked: Any) -> list[TrajectoryGroup]:
            # They are newer where a sampler was lost, and no other was left
            if roles.rollout.version < held:
                raise RunStopped(f"the sampler serves version {roles.rollout.version}, and the step began with {held}")
            return respond(roles, *asked)

        def work() -> None:
            beside = self._roles.beside
            try:
                with beside.beside_training() if beside else nullcontext():
                    result.set_result(self._sample(number, plan, clock, collected))
            except BaseException as error:  # noqa: BLE001  # raised again where the result is waited for
                result.set_exception(error)

        threading.Thread(target=work, name="sampler", daemon=True).start()

    def _ended(self, sampling: Future[AnySelection], since: str) -> Future[AnySelection]:
        """Wait until the thread has sampled, or failed. A sampler that lacks weights gets the present ones.

        Raises: RunStopped when it does not end in time ``since`` something.
        """
        roles, until = self._roles, time.monotonic() + self._wait_timeout_s
        while not wait([sampling], min(LOOK_S, self._wait_timeout_s)).done:
            if roles.beside and self._clock and self._clock.stopping:
                roles.beside.leave()
            elif roles.beside and roles.beside.needs_weights:
                roles.weight_sync.publish(roles.policy, roles.rollout)
            if time.monotonic() > until:
                raise RunStopped(
                    f"the responses of step {self.ledger.steps + 2} were not sampled within {self._wait_timeout_s:g} s after "
                    f"{since} (asynchronous.wait_timeout_s)"
                )
        self._sampling = None
        return sampling

    def _owe(self) -> None:
        """The next step's batch was left: nothing of it was drawn, and the samplers' weights are kept for it."""
        self._loader.restore(self._position)
        self._owed = True
        assert self.folder is not None
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._roles.beside and not self._roles.beside.keep_weights(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _sample_owed(self, number: int, plan: StepPlan, clock: PhaseClock) -> None:
        """Sample the batch that is owed to this step, with the weights that were kept for it; where there are none, with the
        present ones, as its versions show. The ledger has it as the step before would have entered it."""
        roles, folder = self._roles, self.folder
        assert folder is not None
        if roles.beside and folder.is_dir():
            roles.beside.take_kept(folder)
        selection = self._sample(number, plan, clock, respond)
        roles.weight_sync.publish(roles.policy, roles.rollout)
        with self.ledger.in_the_step_before():
            self._have_next(selection)
        self._owed = False
        shutil.rmtree(folder, ignore_errors=True)

    def _have_next(self, selection: AnySelection) -> None:
        self._next = selection
        self._admit(selection)

    def _admit(self, selection: AnySelection) -> None:
        """Enter all groups that were sampled into the ledger; those that the filter rejected leave it at once."""
        ledger, kept = self.ledger, once(selection.groups)
        held = {id(each.group) for each in kept}
        rejected = [each for each in selection.sampled if id(each.group) not in held]
        for each in (*rejected, *kept):
            has_place = id(each.group) in held
            entry = ledger.admit(each.group.prompt.prompt_id, ledger.steps + 1, check=has_place)
            ledger.finish(entry.serial)
            if not has_place:
                ledger.take([entry], ())

    # ---------------------------------------------------------------------------------------------- between two steps

    def still(self) -> AbstractContextManager[None]:
        """No-op: between two steps nothing is sampled."""
        return nullcontext()

    def snapshot(self) -> OneStepSnapshot:
        return self.ledger.state(), self._next, self._owed, (self.epochs, self._next_epochs)

    def go_back(self, snapshot: OneStepSnapshot) -> None:
        """Undo a step that was left before its update; sampling that is under way ends first."""
        if self._sampling is not None:
            self._ended(self._sampling, "the step was left")
        state, self._next, self._owed, (self.epochs, self._next_epochs) = snapshot
        self.ledger.restore(state)

    def start_after(self, step: int) -> None:
        """Start with nothing sampled, after the steps of a synchronous run."""
        self.ledger.start_after(step)
        self.epochs = self._next_epochs = self._loader.epochs

    def state(self) -> dict[str, Any]:
        """Plain values from which ``restore`` resumes."""
        following = self._next and {**_groups_to_plain(self._next.groups), "counts": self._next.counts()}
        owed = {"owed": True} if self._owed else {}
        epochs = [self.epochs, self._next_epochs]
        return {"ledger": self.ledger.state(), "next": following, "epochs": epochs, **owed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises: RunStopped when the saved groups do not fit into the bounds of this run."""
        self.ledger.restore(state["ledger"])
        self._next, self._owed = None, bool(state.get("owed"))
        # An earlier version did not save them
        self.epochs, self._next_epochs = state.get("epochs", [self._loader.epochs] * 2)
        if state["next"]:
            plan = self._plan_of(self.ledger.steps + 1)
            groups = _groups_from_plain(state["next"], self._prompts)
            counts = state["next"]["counts"]
            if plan.domains:
                self._next = DomainSelection.of(groups, counts, plan.domains)
            else:
                self._next = Selection.of(groups, counts, plan.group_filter, plan.prompts)


def once(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """The groups of a step, each once: a filter that replaces rejected groups holds others more than once."""
    return list({id(each.group): each for each in groups}.values())


def _groups_to_plain(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    number = {id(each.group): place for place, each in enumerate(once(groups))}
    return {
        "groups": [scored_to_plain(each) for each in once(groups)],
        "places": [number[id(each.group)] for each in groups],
    }


def _groups_from_plain(plain: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> list[ScoredGroup]:
    groups = [scored_from_plain(each, prompts) for each in plain["groups"]]
    return [groups[number] for number in plain["places"]]
