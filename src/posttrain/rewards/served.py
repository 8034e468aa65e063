"""Terms that ask a server, beside those that are functions.

They are asked in a thread of the process that trains, which waits but does not work, from the moment a group's last response
is done. A response that another term, asked about one response at a time, could not score costs nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config.reward import RewardConfig, RewardTerm
from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.interfaces.reward import NotScored
from posttrain.processes.limits import CRASHED, EXCEPTION
from posttrain.records.trajectories import Invalid, Outcome, Reward, TrajectoryGroup
from posttrain.rewards.asking import AskingReward, Result
from posttrain.rewards.background import background
from posttrain.rewards.built_in import built_in
from posttrain.rewards.score import LARGEST, NOT_FINITE
from posttrain.rewards.scorer import Scorer, start_rewards
from posttrain.rewards.sources import ASK_A_SERVER

# What the server terms said of a response, by their place among them; those behind a failure are missing.
Answers = dict[int, Result]


@dataclass(frozen=True, slots=True)
class ServerTerm:
    name: str
    weight: float
    reward: AskingReward
    data_sources: frozenset[str] = frozenset()  # it counts for prompts of these only; empty means all


def start_scorer(config: RewardConfig) -> Scorer:
    """The scorer of a run, with everything that it needs.

    Raises: ConfigError with the problems of all terms.
    """
    asks = [asks_a_server(term) for term in config.terms]
    if not any(asks):
        return start_rewards(config)
    served = _load(config)
    places = [index for index, asking in enumerate(asks) if not asking]
    rest = config.model_copy(update={"terms": [config.terms[index] for index in places]})
    try:
        return ScorerWithServers(served, rest, start_rewards(rest, hidden=frozenset(_variables(config))))
    except ConfigError as error:
        raise ConfigError([_at_its_place(problem, places) for problem in error.problems]) from error


def _variables(config: RewardConfig) -> Iterator[str]:
    """Names of the environment variables that hold keys of servers. They are for this process, which asks; the workers, which
    run other people's functions, do not get them."""
    for term in config.terms:
        if asks_a_server(term):
            yield from (term.options.get("headers_from_env") or {}).values()
            if term.options.get("api_key_env"):
                yield term.options["api_key_env"]


def asks_a_server(term: RewardTerm) -> bool:
    return term.path is None and term.name in ASK_A_SERVER


class ScorerWithServers(Scorer):
    """Adds weight x value of the server terms to what the rest gives. A response that a term of the rest could not score, or
    an earlier server term, is not asked about (batched terms are asked at the end and cannot prevent it)."""

    def __init__(self, served: Sequence[ServerTerm], config: RewardConfig, rest: Scorer):
        """``config`` is that of the rest."""
        self._served = tuple(served)
        self._config = config
        self._rest = rest
        self._begun: dict[int, tuple[TrajectoryGroup, Future[list[Answers]]]] = {}  # by id(group)

    def begin(self, group: TrajectoryGroup) -> None:
        if id(group) in self._begun:
            return
        if self._rest_has_a_say(group):
            self._rest.begin(group)
            ready = self._rest.hopeful(group)
        else:
            ready = [_done(True) for _ in group.trajectories]
        self._begun[id(group)] = group, background().begin(self._ask_about(group, ready))

    async def _ask_about(self, group: TrajectoryGroup, ready: Sequence[Future[bool]]) -> list[Answers]:
        terms = [(place, term) for place, term in enumerate(self._served) if _counts(term.data_sources, group)]

        async def about(response: str, hope: Future[bool]) -> Answers:
            answers: Answers = {}
            worth_it: bool = await asyncio.wrap_future(hope)
            if worth_it:
                for place, term in terms:
                    answers[place] = result = await term.reward.ask(group.prompt, response)
                    if isinstance(result, Exception):
                        break
            return answers

        texts = [trajectory.text for trajectory in group.trajectories]
        return await asyncio.gather(*map(about, texts, ready))

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        for group in groups:
            self.begin(group)
        rest = iter(self._rest.score([group for group in groups if self._rest_has_a_say(group)]))
        scored = []
        for group in groups:
            own = next(rest) if self._rest_has_a_say(group) else [Reward(0.0)] * len(group.trajectories)
            scored.append(tuple(map(self._with_servers, own, self._answers(group))))
        self._begun.clear()  # also of groups that were begun and are not wanted any more
        return scored

    def _answers(self, group: TrajectoryGroup) -> list[Answers]:
        try:
            return self._begun[id(group)][1].result()
        except (Exception, CancelledError) as error:  # noqa: BLE001 - counted and shown, as any other failure
            return [dict.fromkeys(range(len(self._served)), _as_exception(error))] * len(group.trajectories)

    def _with_servers(self, outcome: Outcome, answers: Answers) -> Outcome:
        for place, result in sorted(answers.items()):
            if isinstance(outcome, Reward):
                outcome = _added(outcome, self._served[place], result)
        return outcome

    def keep_in(self, folder: Path) -> None:
        """The run's folder, for answers that a resumed run need not pay again. Raises: ConfigError."""
        for term in self._served:
            term.reward.keep_in(folder)

    def take_costs(self) -> dict[str, float]:
        """reward/cost/<term>/<name> since this was called before."""
        return {
            f"reward/cost/{term.name}/{name}": float(count)
            for term in self._served
            for name, count in term.reward.take_counts().items()
        }

    def hopeful(self, group: TrajectoryGroup) -> list[Future[bool]]:
        return self._rest.hopeful(group)

    def close(self) -> None:
        for _, future in self._begun.values():
            future.cancel()
        for term in self._served:
            term.reward.close()
        self._rest.close()

    def _rest_has_a_say(self, group: TrajectoryGroup) -> bool:
        """Whether one of the other terms counts for a group; also where no term at all does, which they report."""
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
    """What the terms of a reward are called in metrics and records, in their order. Those that ask a server are named after the
    others; a name used again becomes name_2."""
    used: Counter[str] = Counter()
    names = [""] * len(terms)
    for index in sorted(range(len(terms)), key=lambda index: asks_a_server(terms[index])):
        name = terms[index].name
        used[name] += 1
        names[index] = name if used[name] == 1 else f"{name}_{used[name]}"
    return names


def _load(config: RewardConfig) -> list[ServerTerm]:
    """Raises: ConfigError with the problems of all server terms."""
    terms, problems = [], []
    for index, (term, name) in enumerate(zip(config.terms, term_names(config.terms), strict=True)):
        if not asks_a_server(term):
            continue
        try:
            reward: Callable[..., object] = built_in(term.name, term.options)
        except RequestError as error:
            problems += [
                replace(problem, field=f"reward.terms.{index}.{problem.field or 'name'}") for problem in error.problems
            ]
        else:
            assert isinstance(reward, AskingReward)
            terms.append(ServerTerm(name, term.weight, reward, frozenset(term.data_sources)))
    if problems:
        raise ConfigError(problems)
    return terms


def _at_its_place(problem: Problem, places: Sequence[int]) -> Problem:
    """A problem of the rest, whose terms are numbered without those that ask a server."""
    parts = problem.field.split(".")
    if parts[:2] != ["reward", "terms"] or len(parts) < 3 or not parts[2].isdigit():
        return problem
    return replace(problem, field=".".join(["reward", "terms", str(places[int(parts[2])]), *parts[3:]]))
