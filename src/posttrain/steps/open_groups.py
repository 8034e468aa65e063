"""The groups of an asynchronous run from admission to training: their prompts, their samples, and when each is taken."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from posttrain.asynchrony.ledger import Bounds, Ledger
from posttrain.asynchrony.pending import Entry
from posttrain.asynchrony.script import Admission
from posttrain.errors import RunStopped
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.records.marks import mark_of
from posttrain.records.plans import DomainPlan, StepPlan
from posttrain.records.prompts import Prompt
from posttrain.records.saved_groups import trajectory_from_plain, trajectory_to_plain
from posttrain.records.trajectories import SamplingParams, ScoredGroup, Trajectory, TrajectoryGroup, mixed_seed
from posttrain.steps.episodes_in_flight import Episodes
from posttrain.steps.in_flight import InFlight, Place, Responses
from posttrain.steps.rl_step import AnySelection, score_groups

DIFFERS = "the run that is replayed differs from this one"


class KeptGroups(Protocol):
    """Responses of groups from before, by the group's number in the order of admission, from 1."""

    def read_group(self, number: int, prompt: Prompt, sampling: SamplingParams) -> TrajectoryGroup | None:
        """Return the responses; None where the group is to be sampled. Raises: RunStopped for those of another run."""
        ...

    def write_group(self, number: int, group: TrajectoryGroup, sampling: SamplingParams) -> None:
        """Keep the responses of a group that is complete."""
        ...


@dataclass(slots=True)
class OpenGroup:
    """A group from its admission until it is trained."""

    prompt: Prompt
    samples: int
    ended: dict[int, Trajectory] = field(default_factory=dict)  # by number of the sample
    whole: TrajectoryGroup | None = None  # once complete; scoring begins and ends with this very object

    def complete(self) -> TrajectoryGroup:
        if self.whole is None:
            trajectories = tuple(self.ended[number] for number in range(self.samples))
            self.whole = TrajectoryGroup(prompt=self.prompt, trajectories=trajectories)
        return self.whole

    def copy(self) -> OpenGroup:
        return OpenGroup(self.prompt, self.samples, dict(self.ended), self.whole)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A prompt that waits for its admission."""

    prompt: Prompt
    draw: int  # number of the loader's batch, from 1
    attempt: int = 0  # 1 where it replaces a dropped group


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state between two steps, in this process."""

    ledger: Mapping[str, Any]
    draws: int
    waiting: tuple[Drawn, ...]
    groups: Mapping[int, OpenGroup]
    flying: Any  # of InFlight


@dataclass(slots=True)
class Drops:
    """Groups that a step dropped because they were past the bound."""

    groups: list[int] = field(default_factory=list)  # serials
    tokens: int = 0  # sampled for them


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of a step, in the moment in which its weights are handed to the sampler."""

    drops: Drops
    sampled_tokens: int  # in the step
    ahead: int  # groups that are admitted and not trained
    running: int  # of these, the ones with unfinished responses
    more: Mapping[str, float] = field(default_factory=dict)  # metrics of the mode
    idle_s: float = 0.0  # of its sampling, in which only environments were at work; where that is known


class OpenGroups:
    """Groups that are admitted and not trained.

    Args: prompts of the run, by id; sampling_of(draw), the sampling of the loader's batch of this number, from 1; domains, of
        which a step is made up.
    """

    def __init__(
        self,
        roles: Roles,
        scorer: GroupScorer,
        loader: PromptLoader,
        prompts: Mapping[str, Prompt],
        bounds: Bounds,
        sampling_of: Callable[[int], SamplingParams],
        *,
        wait_timeout_s: float,
        keeps_cache: bool = False,  # of unfinished responses, which newer weights continue
        prepared_groups: int = 0,  # whose environments start before their admission
        domains: Sequence[DomainPlan] = (),
        kept: KeptGroups | None = None,  # responses from before
    ):
        self.ledger = Ledger(bounds)
        self.consumed: list[Entry] = []  # by the step under way
        self.marks: dict[int, str] = {}  # of these, by serial (records.marks)
        self.late: set[int] = set()  # groups that it waited for, although enough others were complete
        self.sampling_of = sampling_of
        self._kept = kept
        self._responses = Responses(keeps_cache=keeps_cache)
        self.flying: InFlight = self._responses
        self._preparing: Episodes | None = None  # where environments start before their group's admission
        if roles.worlds:
            self.flying = episodes = Episodes(roles.worlds, self.hear, keeps_cache=keeps_cache)
            self._preparing = episodes if prepared_groups else None
        self._prepared_groups = prepared_groups
        self._prepared: deque[Drawn] = deque()  # in the order of their admission
        self._roles, self._scorer, self._loader, self._prompts = roles, scorer, loader, prompts
        self._wait_timeout_s = wait_timeout_s
        self._heard = 0.0  # when a token was sampled last, or an environment has answered
        self._restored = False  # since the last step
        self._keeps_cache = keeps_cache
        self._recomputes = False  # caches, in the first step after a resume
        self._restarted: list[Entry] = []  # groups whose episodes have begun again since the run was resumed
        self._domain_of = {source: domain.name for domain in domains for source in domain.sources}
        self._draws = 0
        self._waiting: deque[Drawn] = deque()
        self._groups: dict[int, OpenGroup] = {}  # pending ones, by serial

    def begin_step(self, number: int) -> None:
        self.consumed, self.marks, self.late = [], {}, set()
        for entry in self._restarted:
            self.ledger.record({"step": number, "event": "restarted", "group": entry.serial})
        self._restarted = []
        if self._recomputes:
            self.ledger.record({"step": number, "event": "recomputed"})
        self._recomputes = False
        if self._restored:
            self.ledger.record_again()
        self._restored = False

    def admit(self) -> Entry:
        """Admit the next prompt's group that there is room for, and begin its samples."""
        return self._admit(lambda drawn: self.ledger.room(self._domain(drawn.prompt)) > 0, check=True)

    def admit_again(self, recorded: Admission, number: int) -> None:
        """Admit the recorded group, whether or not there is room already: others may have ended before it. The prompts before it
        wait where it replaces a dropped group, while theirs were being prepared.

        Raises: RunStopped when the loader's batch has no such prompt left.
        """
        serial = self.ledger.admitted
        if serial != recorded.serial:
            raise RunStopped(
                f"{DIFFERS} in step {number}: group {recorded.serial} is to be admitted, and {serial} is next"
            )

        def is_it(drawn: Drawn) -> bool:
            mine = (drawn.prompt.prompt_id, drawn.draw, drawn.attempt)
            return mine == (recorded.prompt_id, recorded.draw, recorded.attempt)

        while not any(is_it(drawn) for drawn in self._waiting):
            if recorded.draw <= self._draws:
                following = self._waiting[0].prompt.prompt_id if self._waiting else "none"
                raise RunStopped(
                    f"{DIFFERS} in step {number}: group {serial} is {recorded.prompt_id} of the loader's batch {recorded.draw}, "
                    f"which has no such prompt left; the next one is {following}"
                )
            self._draw()
        self._admit(is_it, check=False, started=number - 1 if recorded.started is None else recorded.started)

    def _admit(self, fits: Callable[[Drawn], bool], *, check: bool, started: int | None = None) -> Entry:
        preparing = self._preparing if self._prepared else None
        drawn = self._prepared.popleft() if preparing else self._drawn(fits)
        domain = self._domain(drawn.prompt)
        entry = self.ledger.admit(
            drawn.prompt.prompt_id, drawn.draw, drawn.attempt, domain=domain, check=check, started=started
        )
        samples = self.sampling_of(drawn.draw).samples_per_prompt
        self._groups[entry.serial] = OpenGroup(drawn.prompt, samples)
        if preparing is None:
            self._begin(entry)
        else:
            for number in range(samples):
                preparing.admit(Place(entry.serial, number))
        return entry

    def may_admit(self, slots: int) -> bool:
        """Tell whether a group is admitted now: with room for it, when the step under way needs it or one of the sampler's
        ``slots`` is free, and its environments are ready where they were started before. It would grow stale while it waits."""
        if not self.ledger.room() or not (self.ledger.lacks or self.flying.requests < slots):
            return False
        if self._preparing is None or not self._prepared:
            return True
        serial, samples = self.ledger.admitted, self.sampling_of(self._prepared[0].draw).samples_per_prompt
        return all(self._preparing.is_prepared(Place(serial, number)) for number in range(samples))

    def prepare(self) -> None:
        """Start the environments of the groups to be admitted next: as many as allowed, and as the run can still train."""
        if self._preparing is None:
            return
        bounds = self.ledger.bounds
        left = (bounds.total_steps - self.ledger.steps) * bounds.groups_per_step - len(self.ledger.pending)
        while len(self._prepared) < min(self._prepared_groups, left):
            drawn = self._drawn()
            serial, sampling = self.ledger.admitted + len(self._prepared), self._sampling(drawn.draw, drawn.attempt)
            for number in range(sampling.samples_per_prompt):
                self._preparing.prepare(Place(serial, number), drawn.prompt, sampling)
            self._prepared.append(drawn)

    def _drawn(self, fits: Callable[[Drawn], bool] = lambda drawn: True) -> Drawn:
        """The first prompt that waits and fits."""
        while True:
            for place, drawn in enumerate(self._waiting):
                if fits(drawn):
                    del self._waiting[place]
                    return drawn
            self._draw()

    def _draw(self) -> None:
        """Draw the next batch of the loader; of domains, the part of a step of those of which no prompt waits, whether or not
        they fit: what is drawn depends on what was admitted before, and not on when."""
        waiting = {self._domain(drawn.prompt) for drawn in self._waiting}
        wanting = [name for name in self.ledger.bounds.shares if name not in waiting]
        assert wanting or not self._domain_of, "a domain fits"
        self._draws += 1
        prompts = self._loader.next(wanting if self._domain_of else None)
        self._waiting += [Drawn(prompt, self._draws) for prompt in prompts]

    def _domain(self, prompt: Prompt) -> str:
        return self._domain_of.get(prompt.data_source, "")

    def complete(self, serials: Collection[int]) -> bool:
        """Tell whether all samples of these groups have ended."""
        running = {entry.serial for entry in self.ledger.running}
        pending = {entry.serial for entry in self.ledger.pending}
        return pending - running >= set(serials)

    def chosen_again(self, chosen: Sequence[int], number: int) -> Sequence[Entry]:
        """The recorded choice of a step. Raises: RunStopped when a group of it is not complete."""
        for serial in chosen:
            if not self.complete([serial]):
                raise RunStopped(f"{DIFFERS} in step {number}: group {serial} is not complete")
        return [self.ledger.entry(serial) for serial in chosen]

    def end(self, place: Place, trajectory: Trajectory) -> None:
        """A sample has ended."""
        group = self._groups[place.serial]
        group.ended[place.number] = trajectory
        if len(group.ended) == group.samples:
            self.ledger.finish(place.serial)
            if self._kept:
                entry = self.ledger.entry(place.serial)
                self._kept.write_group(entry.serial + 1, group.complete(), self._sampling(entry.draw, entry.attempt))
            self._scorer.begin(group.complete(), keep=True)  # while others are sampled
        self.late |= {entry.serial for entry in self.ledger.awaited()}

    def scored(self, chosen: Sequence[Entry], plan: StepPlan) -> list[ScoredGroup]:
        """Score complete groups."""
        complete = [self._groups[entry.serial].complete() for entry in chosen]
        return score_groups(complete, self._roles, self._scorer, plan)

    def take(self, chosen: Sequence[Entry], scored: Sequence[ScoredGroup], selection: AnySelection) -> None:
        """Take scored groups out; those that the selection does not keep count as filtered."""
        kept = {id(each.group) for each in selection.groups}
        passed = [pair for pair in zip(chosen, scored, strict=True) if id(pair[1].group) in kept]
        marks = {entry.serial: mark_of(each) for entry, each in passed}
        wanting = () if selection.complete else selection.wanting
        self.ledger.take(chosen, marks, wanting, marks)
        self.consumed += [entry for entry, _ in passed]
        self.marks |= marks
        for entry in chosen:
            del self._groups[entry.serial]

    def end_step(self, *, synced: bool = True) -> Drops:
        """The step has been trained, and the samplers were given its weights (``synced``). Groups past the bound are dropped,
        with ``drop``, and their prompts wait to be admitted once more."""
        drops, again = Drops(), []
        for entry in self.ledger.end_step(synced=synced):
            group = self._groups.pop(entry.serial)
            drops.groups.append(entry.serial)
            if group.whole is not None:
                self._scorer.forget([group.whole])
            drops.tokens += sum(each.sampled_tokens for each in group.ended.values())
            drops.tokens += self.flying.drop(entry.serial)
            if entry.attempt == 0:
                again.append(Drawn(group.prompt, entry.draw, attempt=1))
        self._waiting.extendleft(reversed(again))
        return drops

    def hear(self) -> None:
        """A token was sampled, or an environment has answered."""
        self._heard = time.monotonic()

    def check_heard(self, number: int) -> None:
        """Raises: RunStopped when step ``number`` has waited for a token for longer than allowed."""
        if time.monotonic() - self._heard <= self._wait_timeout_s:
            return
        awaited = [entry.prompt_id for entry in self.ledger.awaited() or self.ledger.running]
        raise RunStopped(
            f"the sampler gave no token for {self._wait_timeout_s:g} s (asynchronous.wait_timeout_s), while step {number} "
            f"waits for responses to {', '.join(awaited[:3])}{', ...' if len(awaited) > 3 else ''}"
        )

    def _begin(self, entry: Entry) -> None:
        """Begin the samples of a group that have not ended."""
        group, sampling = self._groups[entry.serial], self._sampling(entry.draw, entry.attempt)
        before = self._kept.read_group(entry.serial + 1, group.prompt, sampling) if self._kept else None
        for number in range(group.samples):
            if number in group.ended:
                continue
            if before is not None:
                self._responses.give(Place(entry.serial, number), before.trajectories[number])
            else:
                self.flying.begin(Place(entry.serial, number), group.prompt, sampling)

    def _sampling(self, draw: int, attempt: int) -> SamplingParams:
        """The sampling of a prompt of this draw; one that is sampled again has other random numbers."""
        sampling = self.sampling_of(draw)
        return replace(sampling, seed=mixed_seed(sampling.seed, attempt)) if attempt else sampling

    # ---------------------------------------------------------------------------------------------- between two steps

    def snapshot(self) -> Snapshot:
        groups = {serial: group.copy() for serial, group in self._groups.items()}
        return Snapshot(
            self.ledger.state(), self._draws, (*self._prepared, *self._waiting), groups, self.flying.snapshot()
        )

    def go_back(self, snapshot: Snapshot) -> None:
        """Undo a step that was left before its update."""
        self.ledger.restore(snapshot.ledger)
        self._draws, self._waiting = snapshot.draws, deque(snapshot.waiting)
        self._prepared.clear()
        self._groups = {serial: group.copy() for serial, group in snapshot.groups.items()}
        self.flying.go_back(snapshot.flying)

    def start_after(self, step: int) -> None:
        """Start with nothing sampled, after the steps of a synchronous run, each of which has drawn a batch."""
        self.ledger.start_after(step)
        self._draws = step

    def state(self) -> dict[str, Any]:
        """Plain values from which ``restore`` resumes."""
        return {
            "ledger": self.ledger.state(),
            "draws": self._draws,
            "waiting": [
                [drawn.prompt.prompt_id, drawn.draw, drawn.attempt] for drawn in (*self._prepared, *self._waiting)
            ],
            "groups": {
                serial: {
                    "samples": group.samples,
                    "ended": {number: trajectory_to_plain(each) for number, each in group.ended.items()},
                }
                for serial, group in self._groups.items()
            },
            "begun": self.flying.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises: RunStopped when the saved groups do not fit into the bounds of this run."""
        self.ledger.restore(state["ledger"])
        self._draws = int(state["draws"])
        self._waiting = deque(Drawn(self._prompts[name], draw, attempt) for name, draw, attempt in state["waiting"])
        self._restored = True
        self._groups = {}
        for serial, saved in state["groups"].items():
            entry = self.ledger.entry(int(serial))
            self._groups[entry.serial] = OpenGroup(
                self._prompts[entry.prompt_id],
                saved["samples"],
                {int(number): trajectory_from_plain(each) for number, each in saved["ended"].items()},
            )
        self.flying.restore(state["begun"])
        self._recomputes = self._keeps_cache and bool(state["begun"])
        for entry in self.ledger.running:
            self._begin(entry)
        self._restarted = [entry for entry in self.ledger.running if self.flying.began_again(entry.serial)]
