"""Reward terms that query a server, scored together with the terms that are functions.

A thread of the training process, which only waits, sends the requests as soon as a group's last response is complete. A
response that a per-response term could not score causes no request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config.reward import RewardConfig, RewardTerm
from posttrain.config.reward_placement import facts_of
from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.interfaces.reward import NotScored
from posttrain.processes.limits import CRASHED, EXCEPTION
from posttrain.records.trajectories import Invalid, Outcome, Reward, TrajectoryGroup
from posttrain.rewards.background import background
from posttrain.rewards.built_in import built_in
from posttrain.rewards.score import LARGEST, NOT_FINITE, Decode
from posttrain.rewards.scorer import Factory, Scorer, start_rewards
from posttrain.rewards.server_reward import Result, ServerReward

# Answers of the server terms about a response, by index; those after a failure are missing.
Answers = dict[int, Result]


@dataclass(frozen=True, slots=True)
class ServerTerm:
    name: str
    weight: float
    reward: ServerReward
    data_sources: frozenset[str] = frozenset()  # the prompts the term applies to; empty means all


def start_scorer(config: RewardConfig, decode: Decode | None = None, tokenizer: Factory | None = None) -> Scorer:
    """Start the scorer of a run, with its workers and servers.

    Args: ``decode`` gives the text of token ids, special tokens kept, to terms that read the sequence; ``tokenizer`` makes
        that of reward managers.

    Raises: ConfigError with the problems of all terms.
    """
    asks = [queries_a_server(term) for term in config.terms]
    if not any(asks):
        return start_rewards(config, decode=decode, tokenizer=tokenizer)
    served = _load(config)
    places = [index for index, asking in enumerate(asks) if not asking]
    rest = config.model_copy(update={"terms": [config.terms[index] for index in places]})
    try:
        return ScorerWithServers(
            served,
            rest,
            start_rewards(rest, withheld=frozenset(_variables(config)), decode=decode, tokenizer=tokenizer),
        )
    except ConfigError as error:
        raise ConfigError([_at_its_place(problem, places) for problem in error.problems]) from error


def _variables(config: RewardConfig) -> Iterator[str]:
    """Yield the environment variables that hold keys of servers. Only this process, which sends the requests, sees them; the
    workers, which run users' functions, do not."""
    for term in config.terms:
        if queries_a_server(term):
            yield from (term.options.get("headers_from_env") or {}).values()
            if term.options.get("api_key_env"):
                yield term.options["api_key_env"]


def queries_a_server(term: RewardTerm) -> bool:
    return facts_of(term).queries_server


class ScorerWithServers(Scorer):
    """Adds weight x value of the server terms to the other terms. Responses that a per-response term or an earlier server
    term could not score are not sent (batched terms run last and cannot prevent it)."""

    def __init__(self, served: Sequence[ServerTerm], config: RewardConfig, rest: Scorer):
        """``config`` is the configuration of the other terms."""
        self._served = tuple(served)
        self._config = config
        self._rest = rest
        self._begun: dict[int, tuple[TrajectoryGroup, Future[list[Answers]]]] = {}  # by id(group)
        self._kept: set[int] = set()  # of these, the ones that stay until they are scored or forgotten

    def begin(self, group: TrajectoryGroup, *, keep: bool = False) -> None:
        if keep:
            self._kept.add(id(group))
        if id(group) in self._begun:
            return
        if self._rest_counts_for(group):
            self._rest.begin(group, keep=keep)
            ready = self._rest.scorable(group)
        else:
            ready = [_done(True) for _ in group.trajectories]
        self._begun[id(group)] = group, background().begin(self._score_on_servers(group, ready))

    async def _score_on_servers(self, group: TrajectoryGroup, ready: Sequence[Future[bool]]) -> list[Answers]:
        terms = [(place, term) for place, term in enumerate(self._served) if _counts(term.data_sources, group)]

        async def answers_about(response: str, scorable: Future[bool]) -> Answers:
            answers: Answers = {}
            ask_server: bool = await asyncio.wrap_future(scorable)
            if ask_server:
                for place, term in terms:
                    answers[place] = result = await term.reward.score_one(group.prompt, response)
                    if isinstance(result, Exception):
                        break
            return answers

        texts = [trajectory.text for trajectory in group.trajectories]
        return await asyncio.gather(*map(answers_about, texts, ready))

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        for group in groups:
            self.begin(group)
        unwanted = [group for key, (group, _) in list(self._begun.items()) if key not in self._kept]
        rest = iter(self._rest.score([group for group in groups if self._rest_counts_for(group)]))
        scored = []
        for group in groups:
            own = next(rest) if self._rest_counts_for(group) else [Reward(0.0)] * len(group.trajectories)
            scored.append(tuple(map(self._with_servers, own, self._answers(group))))
        self.forget([*groups, *unwanted])
        return scored

    def forget(self, groups: Sequence[TrajectoryGroup]) -> None:
        for group in groups:
            self._begun.pop(id(group), None)
            self._kept.discard(id(group))
        self._rest.forget(groups)

    def _answers(self, group: TrajectoryGroup) -> list[Answers]:
        try:
            return self._begun[id(group)][1].result()
        except (Exception, CancelledError) as error:  # noqa: BLE001 - counted and reported, as any other failure
            return [dict.fromkeys(range(len(self._served)), _as_exception(error))] * len(group.trajectories)

    def _with_servers(self, outcome: Outcome, answers: Answers) -> Outcome:
        for place, result in sorted(answers.items()):
            if isinstance(outcome, Reward):
                outcome = _added(outcome, self._served[place], result)
        return outcome

    def at_step(self, step: int) -> None:
        self._rest.at_step(step)

    def keep_in(self, folder: Path) -> None:
        """Cache answers in the run's folder, so that a resumed run does not pay for them again. Raises: ConfigError."""
        for term in self._served:
            term.reward.keep_in(folder)

    def take_costs(self) -> dict[str, float]:
        """Return reward/cost/<term>/<name> since the previous call."""
        return {
            f"reward/cost/{term.name}/{name}": float(count)
            for term in self._served
            for name, count in term.reward.take_counts().items()
        }

    def scorable(self, group: TrajectoryGroup) -> list[Future[bool]]:
        return self._rest.scorable(group)

    def close(self) -> None:
        for _, future in self._begun.values():
            future.cancel()
        for term in self._served:
            term.reward.close()
        self._rest.close()

    def _rest_counts_for(self, group: TrajectoryGroup) -> bool:
        """Return True when another term counts for a group, or no term does, which the other terms report."""
        served = any(_counts(term.data_sources, group) for term in self._served)
        return not served or any(_counts(frozenset(term.data_sources), group) for term in self._config.terms)


def _counts(data_sources: frozenset[str], group: TrajectoryGroup) -> bool:
    return not data_sources or group.prompt.data_source in data_sources


def _done(value: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(value)
    return future


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else NotScored(CRASHED, "asking was given up")


def _added(outcome: Outcome, term: ServerTerm, result: float | Exception) -> Outcome:
    assert isinstance(outcome, Reward)
    if isinstance(result, Exception):
        reason = result.reason if isinstance(result, NotScored) else EXCEPTION
        said = str(result) if isinstance(result, NotScored) else f"{type(result).__name__}: {result}"
        return Invalid(reason, f"{term.name}: {said}"[:500])
    total = outcome.value + term.weight * result
    if not abs(total) <= LARGEST:
        return Invalid(NOT_FINITE, f"the weighted sum is {total}")
    return Reward(total, (*outcome.terms, (term.name, result)), outcome.texts)


def term_names(terms: Sequence[RewardTerm]) -> list[str]:
    """Return the terms' names for metrics and records, in their order. Terms that query a server are named after the others; a
    repeated name becomes name_2."""
    used: Counter[str] = Counter()
    names = [""] * len(terms)
    for index in sorted(range(len(terms)), key=lambda index: queries_a_server(terms[index])):
        name = terms[index].name
        used[name] += 1
        names[index] = name if used[name] == 1 else f"{name}_{used[name]}"
    return names


def _load(config: RewardConfig) -> list[ServerTerm]:
    """Build the server terms. Raises: ConfigError with the problems of all of them."""
    terms, problems = [], []
    for index, (term, name) in enumerate(zip(config.terms, term_names(config.terms), strict=True)):
        if not queries_a_server(term):
            continue
        try:
            reward: Callable[..., object] = built_in(term.name, term.options)
        except RequestError as error:
            problems += [
                replace(problem, field=f"reward.terms.{index}.{problem.field or 'name'}") for problem in error.problems
            ]
        else:
            assert isinstance(reward, ServerReward)
            terms.append(ServerTerm(name, term.weight, reward, frozenset(term.data_sources)))
    if problems:
        raise ConfigError(problems)
    return terms


def _at_its_place(problem: Problem, places: Sequence[int]) -> Problem:
    """Restore the index of a term in a problem: the other terms are numbered without those that query a server."""
    parts = problem.field.split(".")
    if parts[:2] != ["reward", "terms"] or len(parts) < 3 or not parts[2].isdigit():
        return problem
    return replace(problem, field=".".join(["reward", "terms", str(places[int(parts[2])]), *parts[3:]]))
