"""Sample ahead of training: a step takes the groups that are complete, and unfinished responses continue under newer weights.

Responses are sampled until the ledger has a step's groups. Then the sampler stops between two tokens: what is unfinished is kept
as token ids, and continues in the next step from there, its keys and values computed with the new weights. Between two steps
everything but environments is therefore a plain value, which a checkpoint holds and from which a resumed run continues bit for
bit. Decisions depend on the order in which responses end, counted in passes of the sampler, and not on seconds; only the answers
of environments come when they come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from posttrain.asynchrony.ledger import Bounds, Entry, Ledger
from posttrain.asynchrony.script import Round, Script
from posttrain.errors import RunStopped
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.rollout_engine import ResumableStream
from posttrain.records.plans import StepPlan
from posttrain.records.prompts import Prompt
from posttrain.records.saved_groups import trajectory_from_plain, trajectory_to_plain
from posttrain.records.trajectories import (
    SamplingParams,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    mixed_seed,
)
from posttrain.steps.episodes_in_flight import Episodes
from posttrain.steps.in_flight import Cut, InFlight, Place, Responses
from posttrain.steps.rl_step import score_groups
from posttrain.steps.select import Selection

_DIFFERS = "the run that is replayed differs from this one"


@dataclass(slots=True)
class OpenGroup:
    """A group from its admission until it is trained."""

    prompt: Prompt
    samples: int
    ended: dict[int, Trajectory] = field(default_factory=dict)  # by number of the sample

    def complete(self) -> TrajectoryGroup:
        return TrajectoryGroup(
            prompt=self.prompt, trajectories=tuple(self.ended[number] for number in range(self.samples))
        )

    def copy(self) -> OpenGroup:
        return OpenGroup(self.prompt, self.samples, dict(self.ended))


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


class Ahead:
    """The groups of a run whose sampling runs ahead of training; ``sample`` gives those of a step.

    Args: prompts of the run, by id; sampling_of(draw), the sampling of the loader's batch of this number, from 1.
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
        script: Script | None = None,
    ):
        self.ledger = Ledger(bounds)
        self.sampled_tokens = 0  # in the step under way
        self.dropped = 0  # groups that the last step dropped
        self.dropped_tokens = 0  # sampled for them
        self.consumed: list[Entry] = []  # by the step under way
        self.late: set[int] = set()  # groups that it waited for, although enough others were complete
        self._roles, self._scorer, self._loader = roles, scorer, loader
        self._prompts, self._sampling_of = prompts, sampling_of
        self._wait_timeout_s = wait_timeout_s
        self._script = script
        self._rounds: list[Round] = []  # of the step under way, when decisions are made again
        self._restarted: list[Entry] = []  # groups whose episodes have begun again since the run was resumed
        self._draws = 0
        self._waiting: deque[Drawn] = deque()
        self._groups: dict[int, OpenGroup] = {}  # pending ones, by serial
        self._flying: InFlight = Episodes(roles.worlds, self._hear) if roles.worlds else Responses()
        self._heard = 0.0  # when a token was sampled last, or an environment has answered

    def sample(self, number: int, plan: StepPlan, clock: PhaseClock) -> Selection:
        """The groups of step ``number``, scored; with a filter that refills, sampled until enough pass.

        Raises: RunStopped when the filter's limit of batches is reached, or nothing is sampled within the time for it.
        """
        self.sampled_tokens, self.consumed, self.late = 0, [], set()
        self._rounds = list(self._script.rounds.get(number, [])) if self._script else []
        for entry in self._restarted:
            self.ledger.record({"step": number, "event": "restarted", "group": entry.serial})
        self._restarted = []
        selection = Selection(plan.group_filter, plan.prompts)
        while not selection.complete:
            with clock.phase("rollout"):
                chosen = self._sample_until_ready(number, clock)
            with clock.phase("reward"):
                complete = [self._groups[entry.serial].complete() for entry in chosen]
                scored = score_groups(complete, self._roles, self._scorer, plan)
                selection.add(scored)
            self._take(chosen, scored, selection)
        return selection

    def before_sync(self) -> None:
        """No-op: nothing is being sampled while the weights change."""

    def end_step(self) -> None:
        """The step has been trained: groups that are past the bound are dropped, with ``drop``."""
        self.dropped = self.dropped_tokens = 0
        again = []
        for entry in self.ledger.end_step():
            group = self._groups.pop(entry.serial)
            self.dropped += 1
            self.dropped_tokens += sum(each.sampled_tokens for each in group.ended.values())
            self.dropped_tokens += self._flying.drop(entry.serial)
            if entry.attempt == 0:
                again.append(Drawn(group.prompt, entry.draw, attempt=1))
        self._waiting.extendleft(reversed(again))

    # --------------------------------------------------------------------------------------------------- one step

    def _sample_until_ready(self, number: int, clock: PhaseClock) -> Sequence[Entry]:
        again = self._next_round(number)
        if again and not again.samples:
            return self._recorded(again, number)
        if not again and (chosen := self.ledger.choice()) is not None:
            self.ledger.record({"step": number, "event": "ready"})
            return chosen

        def on_tokens(tokens: int) -> None:
            self.sampled_tokens += tokens
            self._hear()
            clock.advance(tokens)

        self._hear()
        sampling = self._sampling_of(1)  # each request has the seed of its own draw
        with self._roles.rollout.open_stream(sampling, on_tokens) as opened:
            stream = cast(ResumableStream, opened)
            self._flying.resume(stream)
            if again:
                self._flying.limits = {Place(*place): limit for place, limit in again.cuts.items()}
                for serial, prompt_id in again.admitted:
                    self._admit_again(serial, prompt_id, number)
            while self._flying.busy if again else self.ledger.choice() is None:
                while not again and self.ledger.room():
                    self._admit()
                clock.advance(0)  # the step may be left while only environments are at work
                for place, trajectory in self._flying.poll(stream):
                    self._end(place, trajectory)
                    self.late |= {entry.serial for entry in self.ledger.awaited()}
                if time.monotonic() - self._heard > self._wait_timeout_s:
                    raise RunStopped(self._silence(number))
            for cut in self._flying.suspend(stream):
                self._note(cut)
        if again:
            return self._recorded(again, number)
        chosen = self.ledger.choice()
        assert chosen is not None, "suspending sampling changes nothing"
        return chosen

    def _next_round(self, number: int) -> Round | None:
        if self._script is None:
            return None
        if not self._rounds:
            raise RunStopped(f"{_DIFFERS} in step {number}, which needs more groups than it had")
        return self._rounds.pop(0)

    def _admit_again(self, serial: int, prompt_id: str, number: int) -> None:
        """Admit the recorded group, whether or not there is room already: others may have ended before it."""
        entry = self._admit(check=False)
        if (entry.serial, entry.prompt_id) != (serial, prompt_id):
            raise RunStopped(f"{_DIFFERS} in step {number}: group {entry.serial} is {entry.prompt_id}, not {prompt_id}")

    def _recorded(self, again: Round, number: int) -> Sequence[Entry]:
        complete = {entry.serial for entry in self.ledger.pending} - {entry.serial for entry in self.ledger.running}
        for serial in again.chosen:
            if serial not in complete:
                raise RunStopped(f"{_DIFFERS} in step {number}: group {serial} is not complete")
        return [self.ledger.entry(serial) for serial in again.chosen]

    def _hear(self) -> None:
        self._heard = time.monotonic()

    def _admit(self, *, check: bool = True) -> Entry:
        if not self._waiting:
            self._draws += 1
            self._waiting += [Drawn(prompt, self._draws) for prompt in self._loader.next()]
        drawn = self._waiting.popleft()
        entry = self.ledger.admit(drawn.prompt.prompt_id, drawn.draw, drawn.attempt, check=check)
        self._groups[entry.serial] = OpenGroup(drawn.prompt, self._sampling_of(drawn.draw).samples_per_prompt)
        self._begin(entry)
        return entry

    def _begin(self, entry: Entry) -> None:
        """Begin the samples of a group that have not ended."""
        group, sampling = self._groups[entry.serial], self._sampling_of(entry.draw)
        if entry.attempt:
            sampling = replace(sampling, seed=mixed_seed(sampling.seed, entry.attempt))
        for number in range(group.samples):
            if number not in group.ended:
                self._flying.begin(Place(entry.serial, number), group.prompt, sampling)

    def _end(self, place: Place, trajectory: Trajectory) -> None:
        group = self._groups[place.serial]
        group.ended[place.number] = trajectory
        if len(group.ended) == group.samples:
            self.ledger.finish(place.serial)
            self._scorer.begin(group.complete())  # while others are sampled

    def _note(self, cut: Cut) -> None:
        """Record that a sample stops here until the next step."""
        self.ledger.record(
            {
                "step": self.ledger.steps + 1,
                "event": "cut",
                "group": cut.place.serial,
                "sample": cut.place.number,
                "turn": cut.turn,
                "token": cut.tokens,
                "version": self._roles.rollout.version,
            }
        )

    def _take(self, chosen: Sequence[Entry], scored: Sequence[ScoredGroup], selection: Selection) -> None:
        kept = {id(each.group) for each in selection.groups}
        passed = [entry for entry, each in zip(chosen, scored, strict=True) if id(each.group) in kept]
        self.ledger.take(chosen, [entry.serial for entry in passed])
        self.consumed += passed
        for entry in chosen:
            del self._groups[entry.serial]

    def _silence(self, number: int) -> str:
        awaited = [entry.prompt_id for entry in self.ledger.awaited() or self.ledger.running]
        return (
            f"the sampler gave no token for {self._wait_timeout_s:g} s (asynchronous.wait_timeout_s), while step {number} "
            f"waits for responses to {', '.join(awaited[:3])}{', ...' if len(awaited) > 3 else ''}"
        )

    # ---------------------------------------------------------------------------------------------- between two steps

    def snapshot(self) -> Snapshot:
        groups = {serial: group.copy() for serial, group in self._groups.items()}
        flying = self._flying.snapshot()
        return Snapshot(self.ledger.state(), self._draws, tuple(self._waiting), groups, flying)

    def go_back(self, snapshot: Snapshot) -> None:
        """Undo a step that was left before its update."""
        self._rounds = []
        self.ledger.restore(snapshot.ledger)
        self._draws, self._waiting = snapshot.draws, deque(snapshot.waiting)
        self._groups = {serial: group.copy() for serial, group in snapshot.groups.items()}
        self._flying.go_back(snapshot.flying)

    def start_after(self, step: int) -> None:
        """Start with nothing sampled, after the steps of a synchronous run, each of which has drawn a batch."""
        self.ledger.start_after(step)
        self._draws = step

    def state(self) -> dict[str, Any]:
        """Plain values from which ``restore`` resumes."""
        return {
            "ledger": self.ledger.state(),
            "draws": self._draws,
            "waiting": [[drawn.prompt.prompt_id, drawn.draw, drawn.attempt] for drawn in self._waiting],
            "groups": {
                serial: {
                    "samples": group.samples,
                    "ended": {number: trajectory_to_plain(each) for number, each in group.ended.items()},
                }
                for serial, group in self._groups.items()
            },
            "begun": self._flying.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises: RunStopped when the saved groups do not fit into the bounds of this run."""
        self.ledger.restore(state["ledger"])
        self._draws = int(state["draws"])
        self._waiting = deque(Drawn(self._prompts[name], draw, attempt) for name, draw, attempt in state["waiting"])
        self._groups = {}
        for serial, saved in state["groups"].items():
            entry = self.ledger.entry(int(serial))
            self._groups[entry.serial] = OpenGroup(
                self._prompts[entry.prompt_id],
                saved["samples"],
                {int(number): trajectory_from_plain(each) for number, each in saved["ended"].items()},
            )
        for entry in self.ledger.running:
            self._begin(entry)
        self._restarted = list(self.ledger.running) if self._roles.worlds else []
        self._flying.restore(state["begun"])
