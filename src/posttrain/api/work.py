"""The inside of a session: the state of the step that the caller is making."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from posttrain.api.arguments import check_items, check_rewards
from posttrain.build.train import Training
from posttrain.errors import RequestError
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
from posttrain.steps.updates import Updates


class OneStep:
    """The results of the verbs in one step."""

    def __init__(self, began: Began, plan: StepPlan, clock: Clock):
        self.began, self.plan, self.clock = began, plan, clock
        self.selection = Selection(plan.group_filter, plan.prompts)
        self.scored: ScoredBatch | None = None
        self.shaped: ShapedBatch | None = None
        self.train: TrainBatch | None = None
        self.updates: Updates | None = None
        self.waiting: list[ForwardBackwardStats] = []  # passes since the last optimizer step
        self.first_logprobs: Tensor | None = None  # of the first pass

    def need(self, name: str) -> NoReturn:
        """Raises: RequestError, because the step lacks what ``name`` would have made."""
        raise RequestError(
            f"step {self.began.number} has no {name}: docs/library.md shows the verbs of a step in order"
        )


class Work:
    """A run under way and the step that is being made."""

    def __init__(self, training: Training):
        self.made, self.tokenizer = training.parts, training.tokenizer
        self._step: OneStep | None = None
        self._turns: Turns | None = None
        self._open = True

    def check_open(self) -> None:
        """Raises: RequestError after the block of ``with``, when the models are gone."""
        if not self._open:
            raise RequestError("this session is over: its verbs work inside the block of `with posttrain.start(...)`")

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
        made.roles.weight_sync.publish(made.roles.policy, made.roles.rollout)
        body = body_of(made, _never)
        self._turns = steps_of(body, made.progress, made.plan.loop, made.run)
        turn = next(self._turns, None)
        while turn is not None:
            number, clock = turn
            began = Began(number=number, version=made.roles.policy.version, epochs=made.loader.epochs)
            self._step = OneStep(began, made.plan.step_plan(number), clock)
            yield number
            report = self._finish(self._step)
            self._step = None
            turn = next_turn(self._turns, report)

    @contextmanager
    def leaving_steps(self) -> Iterator[None]:
        """End the run as the command does when a signal makes a verb leave its step."""
        try:
            yield
        except StepAbandoned as abandoned:
            if self._turns is None:
                raise
            self._turns.throw(abandoned)
        finally:
            self._open = False

    def draw(self) -> list[Prompt]:
        return list(self.made.loader.next(self.step.selection.wanting))

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
            step.selection.add(scored)
        return step.selection.groups

    def shape(self, groups: Sequence[ScoredGroup]) -> ShapedBatch:
        step, made = self.step, self.made
        check_items(groups, ScoredGroup, "a batch", "of session.score(...)")
        if not groups:
            raise RequestError("a batch of no groups: give it those of session.score(...)")
        if not step.selection.batches:  # scored by the caller alone
            step.selection.add(groups)
        step.selection.groups = list(groups)
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
