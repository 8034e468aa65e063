"""The inside of a session: the state of the step that the caller is making."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from posttrain.api.arguments import check_rewards
from posttrain.api.kinds import check_items
from posttrain.build.train import Training
from posttrain.errors import RequestError, RunInterrupted
from posttrain.loops.rl_sync import Began, body_of, finish_step, samples_path
from posttrain.loops.training import StepReport, Turns, next_turn, steps_of
from posttrain.records.batches import ScoredBatch, ShapedBatch, TrainBatch
from posttrain.records.plans import StepPlan
from posttrain.records.prompts import Prompt
from posttrain.records.statistics import ForwardBackwardStats, Learned, UpdateStats
from posttrain.records.trajectories import Invalid, Reward, ScoredGroup, TrajectoryGroup
from posttrain.run.clock import Clock
from posttrain.run.samples import write_samples
from posttrain.run.stopping import StepAbandoned
from posttrain.steps.advantage import with_advantages
from posttrain.steps.mini_batches import is_drawn, rows_per_update, with_choice, with_high_entropy
from posttrain.steps.rl_step import StepResult, assembled, score_groups, shape
from posttrain.steps.score import TooManyInvalid
from posttrain.steps.select import Selection
from posttrain.steps.shape_rewards import RewardState
from posttrain.steps.updates import Updates


class LeftEarly(RunInterrupted):
    """The caller left the loop of steps before its end, on purpose."""


class Steps:
    """The numbers of the steps. Once getting the next one has failed, so does every other try: a generator would end without
    a word."""

    def __init__(self, work: Work, made: Iterator[int]):
        self._work, self._made = work, made

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self._work.check_open()
        with self._work.whole("the change to the next step"):
            number = next(self._made, None)
        if number is None:
            raise StopIteration
        return number


class OneStep:
    """The results of the verbs in one step."""

    def __init__(self, began: Began, plan: StepPlan, clock: Clock, rewards: RewardState):
        self.began, self.plan, self.clock = began, plan, clock
        self.selection = Selection(plan.group_filter, plan.prompts)
        self.sampled = 0  # calls of sample, each of which draws other random numbers
        self._given: dict[int, tuple[TrajectoryGroup, ScoredGroup]] = {}  # by the group's identity
        self._rewards, self._rewards_before = rewards, rewards.state()
        self.scored: ScoredBatch | None = None
        self.shaped: ShapedBatch | None = None
        self.train: TrainBatch | None = None
        self.updates: Updates | None = None
        self.waiting: list[ForwardBackwardStats] = []  # passes since the last optimizer step
        self.first_logprobs: Tensor | None = None  # of the first pass

    def select(self, groups: Sequence[TrajectoryGroup], scored: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Take in groups with their rewards; a group that is scored again gets its new rewards, and is counted once.

        Returns: of ``groups``, those that the configuration's filter leaves.
        """
        given = self._given | {id(group): (group, score) for group, score in zip(groups, scored, strict=True)}
        selection = Selection(self.plan.group_filter, self.plan.prompts)
        selection.add([score for _, score in given.values()])
        self._given, self.selection = given, selection
        asked = {id(score.group) for score in scored}
        return [each for each in selection.groups if id(each.group) in asked]

    def take(self, groups: Sequence[ScoredGroup]) -> None:
        """Make the step's batch of ``groups``, of which the caller may have scored some alone."""
        if not self.selection.batches:
            self.selection.add(groups)
        self.selection.groups = list(groups)
        self._rewards.restore(self._rewards_before)  # the running statistics count the last batch of a step alone

    def need(self, name: str) -> NoReturn:
        """Raises: RequestError, because the step lacks what ``name`` would have made."""
        raise RequestError(
            f"step {self.began.number} has no {name}: docs/library.md shows the verbs of a step in order"
        )

    def is_complete(self) -> bool:
        """True once the step can be recorded: everything was made, and no gradient waits for its optimizer step."""
        made = (self.scored, self.shaped, self.train, self.updates)
        return all(each is not None for each in made) and not self.waiting


class Work:
    """A run under way and the step that is being made."""

    def __init__(self, training: Training):
        self.made, self.tokenizer = training.parts, training.tokenizer
        self._step: OneStep | None = None
        self._turns: Turns | None = None
        self._open = True
        self._steps_are_over = False
        self._broken = ""  # the verb that was left half done

    def check_open(self) -> None:
        """Raises: RequestError after the block of ``with``, when the models are gone, and after a verb that was left half
        done."""
        if not self._open:
            raise RequestError("this session is over: its verbs work inside the block of `with posttrain.start(...)`")
        if self._broken:
            raise RequestError(
                f"{self._broken} was left half done, so this session is over: leave the block of `with`, and start it again; "
                "it resumes from its last checkpoint"
            )

    @contextmanager
    def whole(self, verb: str) -> Iterator[None]:
        """However ``verb`` is left but by its end, the session's state is not to be trusted: no other verb works after it."""
        try:
            yield
        except BaseException:
            self._broken = verb
            raise

    @property
    def step(self) -> OneStep:
        """The step. Raises: RequestError outside of one."""
        self.check_open()
        if self._step is None:
            raise RequestError("this is done inside a step: for step in session.steps(): ...")
        return self._step

    def steps(self) -> Iterator[int]:
        self.check_open()
        if self._turns is not None:
            raise RequestError("the steps of a session are made once: its steps() was called before")
        made = self.made
        self._turns = steps_of(body_of(made, _never), made.progress, made.plan.loop, made.run)
        return Steps(self, self._each_step(self._turns))

    def _each_step(self, turns: Turns) -> Iterator[int]:
        made = self.made
        made.roles.weight_sync.publish(made.roles.policy, made.roles.rollout)
        turn = next(turns, None)
        while turn is not None:
            number, clock = turn
            began = Began(number=number, version=made.roles.policy.version, epochs=made.loader.epochs)
            self._step = OneStep(began, made.plan.step_plan(number), clock, made.rewards)
            yield number
            report = self._finish(self._step)
            self._step = None
            turn = next_turn(turns, report)
        self._steps_are_over = True

    @contextmanager
    def leaving_steps(self) -> Iterator[None]:
        """End the run as the command does when a signal makes a verb leave its step, and as a signal does where the caller
        leaves the loop before its last step."""
        try:
            yield
            self._leave_early()
        except StepAbandoned as abandoned:
            if self._turns is None:
                raise
            self._turns.throw(abandoned)
        finally:
            self._open = False

    def _leave_early(self) -> None:
        """Raises: LeftEarly where steps are left, after saving what is done."""
        run, loop = self.made.run, self.made.plan.loop
        if self._steps_are_over or run.first_step > loop.total_steps:
            return
        step, turns, stop = self._step, self._turns, run.stop
        asked = stop.requested
        stop.name = stop.name or "its caller"
        again = (
            f"is made again when the run is started again, from {run.checkpoints.last_good_name() or 'its beginning'}"
        )
        try:
            if self._broken:
                raise RunInterrupted(f"{self._broken} was left half done; the step {again}")
            if step is None or turns is None:
                raise RunInterrupted(f"stopped by {stop.name} before step {run.first_step}; start it again to begin")
            if step.is_complete():
                next_turn(turns, self._finish(step))
            elif step.updates is None:
                turns.throw(StepAbandoned())
            else:
                what = f"stopped by {stop.name} between the updates of step {step.began.number}"
                raise RunInterrupted(f"{what}, which {again}")
        except RunInterrupted as interrupted:
            raise interrupted if asked else LeftEarly(str(interrupted)) from None

    def draw(self) -> list[Prompt]:
        step, loader = self.step, self.made.loader
        before = loader.state()
        try:
            return list(loader.next(step.selection.wanting))
        except BaseException:  # interrupted, perhaps between two rows
            loader.restore(before)
            raise

    def score(self, groups: Sequence[TrajectoryGroup], rewards: Sequence[Sequence[float]] | None) -> list[ScoredGroup]:
        step = self.step
        check_items(groups, TrajectoryGroup, "what is scored", "of sampler.sample(...)")
        with step.clock.phase("reward"):
            if rewards is None:
                try:
                    scored = score_groups(groups, self.made.roles, self.made.scorer, step.plan)
                except TooManyInvalid as error:  # the samples show which part of the reward is broken
                    write_samples(
                        samples_path(self.made.run.folder, step.began.number), step.began.number, error.scored
                    )
                    raise
            else:
                scored = with_rewards(groups, rewards)
            return step.select(groups, scored)

    def shape(self, groups: Sequence[ScoredGroup]) -> ShapedBatch:
        step, made = self.step, self.made
        check_items(groups, ScoredGroup, "a batch", "of session.score(...)")
        if not groups:
            raise RequestError("a batch of no groups: give it those of session.score(...)")
        step.take(groups)
        step.scored = assembled(step.selection, step.plan)
        step.shaped = shape(made.roles, step.scored, made.rewards, step.plan, step.clock)
        return step.shaped

    def mini_batches(self, shaped: ShapedBatch, advantages: Tensor) -> Iterator[TrainBatch]:
        step = self.step
        mask = shaped.sequences.response_mask
        on_tokens = advantages.float() if advantages.dim() == 2 else advantages.float()[:, None].expand(mask.shape)
        step.train = train = with_advantages(shaped, torch.where(mask, on_tokens, 0.0), step.plan.advantage)
        plan = step.plan.update
        with step.clock.phase("update", total=len(train) * plan.epochs):
            self.begin_updates()
            for epoch in range(plan.epochs):
                for rows in rows_per_update(train, plan, epoch):
                    mini_batch = with_high_entropy(train.rows(rows), plan.loss.high_entropy_share)
                    yield with_choice(mini_batch, self.made.roles.policy, plan.loss)
                    step.clock.advance(len(rows))

    def begin_updates(self) -> Updates:
        """The updates of the step, which the first call begins."""
        if self.step.updates is None:
            self.step.updates = Updates(self.made.roles.policy, "policy")
        return self.step.updates

    def _finish(self, step: OneStep) -> StepReport:
        made = self.made
        scored, shaped = step.scored or step.need("batch"), step.shaped or step.need("batch")
        train = step.train or step.need("mini-batches")
        updates = step.updates or step.need("updates")
        if step.waiting:
            step.need("optim_step after its last forward_backward")
        with step.clock.phase("weight_sync"):
            made.roles.weight_sync.publish(made.roles.policy, made.roles.rollout)
        learned = Learned(shaped=shaped, train=train, stats=self._update_stats(step, train, updates))
        done = StepResult(selection=step.selection, scored=scored, learned=learned)
        return finish_step(made, step.began, done, step.selection.sampled_tokens, made.loader.epochs, step.clock)

    def _update_stats(self, step: OneStep, train: TrainBatch, updates: Updates) -> UpdateStats:
        old = train.logprobs.old
        known = old is not None or is_drawn(train, step.plan.update)
        return replace(updates.stats(), trainer_logprobs=old if known else step.first_logprobs)


def with_rewards(groups: Sequence[TrajectoryGroup], rewards: Sequence[Sequence[float]]) -> list[ScoredGroup]:
    """Give every response the caller's reward. Raises: RequestError when there are not as many as responses."""
    sizes = [len(group.trajectories) for group in groups]
    check_rewards(rewards, sizes)
    return [
        ScoredGroup(
            group=group,
            outcomes=tuple(
                Reward(float(value)) if math.isfinite(float(value)) else Invalid("not_finite", f"the reward is {value}")
                for value in values
            ),
        )
        for group, values in zip(groups, rewards, strict=True)
    ]


def _never(number: int, clock: Clock) -> StepReport:
    raise AssertionError("the steps of a session are made by its caller")
