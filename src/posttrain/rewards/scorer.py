"""The scorer of a run: in this process where every term is known to be quick, in workers that can be killed elsewhere."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from posttrain.config.reward import RewardConfig
from posttrain.interfaces.reward import GroupScorer
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Outcome, TrajectoryGroup
from posttrain.rewards.in_worker import FACTORY, answer_of, plain_prompt
from posttrain.rewards.load import load_rewards, terms_of
from posttrain.rewards.score import RewardTerms, Term, TermAnswer, combine
from posttrain.rewards.where import runs_here
from posttrain.rewards.workers.limits import CRASHED, Limits
from posttrain.rewards.workers.pool import Answer, Reply, WorkerPool

MOST_WORKERS = 4  # unless the configuration says otherwise


class Scorer(GroupScorer, Protocol):
    """A GroupScorer that may hold processes."""

    def close(self) -> None:
        """End them."""
        ...


def start_rewards(config: RewardConfig) -> Scorer:
    """The scorer of a run; where it needs workers, these are started and have loaded.

    Raises: ConfigError with the problems of all terms.
    """
    if runs_here(config):
        return ScorerHere(load_rewards(config))
    return ScorerInWorkers(config)


class ScorerHere:
    """Scores when it is asked to, in this process."""

    def __init__(self, terms: RewardTerms):
        self._terms = terms

    def begin(self, group: TrajectoryGroup) -> None:
        """Nothing: in the background it would only take time from the sampler."""

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        return [self._terms.score(group) for group in groups]

    def keep_in(self, folder: Path) -> None:
        """Nothing is kept."""

    def take_costs(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """There is nothing to end."""


class ScorerInWorkers:
    """Scores response by response in workers, as soon as a group is there; batched terms when all groups are."""

    def __init__(self, config: RewardConfig):
        self._terms = terms_of(config)
        self._may_be_none = config.model is not None
        self._one_by_one = any(not term.batched for term in self._terms)
        self._begun: dict[int, tuple[TrajectoryGroup, list[Future[Reply]]]] = {}  # by id(group)
        limits = Limits(
            wall_s=config.timeout_s,
            memory_bytes=int(config.memory_gib * 2**30),
            answer_bytes=(16 if any(term.batched for term in self._terms) else 1) << 20,
        )
        workers = config.workers or min(MOST_WORKERS, _cores())
        self._pool = WorkerPool(FACTORY, config.model_dump(mode="json"), workers=workers, limits=limits)
        try:
            self._pool.check()
        except BaseException:
            self._pool.close()
            raise

    def begin(self, group: TrajectoryGroup) -> None:
        if id(group) not in self._begun:
            self._begun[id(group)] = group, self._ask(group) if self._one_by_one else []

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        for group in groups:
            self.begin(group)
        batched = {
            index: self._ask_batched(index, term, groups) for index, term in enumerate(self._terms) if term.batched
        }
        outcomes = [self._outcomes(group, batched) for group in groups]
        self._begun.clear()  # also of groups that were begun and are not wanted any more
        return outcomes

    def keep_in(self, folder: Path) -> None:
        """Nothing is kept."""

    def take_costs(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._pool.close()

    def _ask(self, group: TrajectoryGroup) -> list[Future[Reply]]:
        prompt = plain_prompt(group.prompt)
        return [
            self._pool.submit({"prompt": prompt, "response": trajectory.text}, seed=_seed(trajectory.sample_id))
            for trajectory in group.trajectories
        ]

    def _ask_batched(self, index: int, term: Term, groups: Sequence[TrajectoryGroup]) -> Iterator[TermAnswer]:
        """Ask about all responses that a batched term counts for; what it says of each, in their order."""
        counting = [
            (group.prompt, trajectory.text)
            for group in groups
            if term.counts_for(group.prompt.data_source)
            for trajectory in group.trajectories
        ]
        if not counting:
            return iter(())
        prompts, responses = [plain_prompt(prompt) for prompt, _ in counting], [response for _, response in counting]
        future = self._pool.submit({"term": index, "prompts": prompts, "responses": responses}, seed=index)
        return (_answer_at(future.result(), place, len(counting)) for place in range(len(counting)))

    def _outcomes(self, group: TrajectoryGroup, batched: Mapping[int, Iterator[TermAnswer]]) -> tuple[Outcome, ...]:
        """``batched`` is taken from, so groups must come in the order in which they were asked about."""
        source = group.prompt.data_source
        _, asked = self._begun[id(group)]
        outcomes = []
        for number in range(len(group.trajectories)):
            answers = self._answers(asked[number].result(), group.prompt) if asked else {}
            answers |= {index: next(said) for index, said in batched.items() if self._terms[index].counts_for(source)}
            outcomes.append(combine(self._terms, answers, source, may_be_none=self._may_be_none))
        return tuple(outcomes)

    def _answers(self, reply: Reply, prompt: Prompt) -> dict[int, TermAnswer]:
        """What the terms that are not batched say. Where the worker itself failed, the first of them did."""
        counting = [
            index for index, term in enumerate(self._terms) if not term.batched and term.counts_for(prompt.data_source)
        ]
        if isinstance(reply, Answer):
            try:
                answers = {int(index): answer_of(values) for index, values in reply.value}
                missing = set(counting) - set(answers)
                if not missing or any(isinstance(answer, Invalid) for answer in answers.values()):
                    return answers
            except (KeyError, TypeError, ValueError):
                pass
            failed = Invalid(CRASHED, "the worker's answer is not one")
        else:
            failed = Invalid(reply.reason, reply.detail)
        return dict.fromkeys(counting, failed)


def _answer_at(reply: Reply, place: int, count: int) -> TermAnswer:
    """The answer about one response in a reply about many."""
    if not isinstance(reply, Answer):
        return Invalid(reply.reason, reply.detail)
    values: Any = reply.value
    try:
        if len(values) == count:
            return answer_of(values[place])
    except (KeyError, TypeError, ValueError):
        pass
    return Invalid(CRASHED, "the worker's answer is not one")


def _seed(sample_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(sample_id.encode(), digest_size=4).digest(), "little")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
