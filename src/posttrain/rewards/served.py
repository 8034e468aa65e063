"""Terms that ask a server, beside those that are functions.

They run in the process that trains, which waits but does not work, and are asked last, about all groups at once: a response
that another term could not score costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config.reward import RewardConfig, RewardTerm
from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.interfaces.reward import NotScored
from posttrain.records.trajectories import Invalid, Outcome, Reward, TrajectoryGroup
from posttrain.rewards.asking import AskingReward
from posttrain.rewards.built_in import built_in
from posttrain.rewards.score import LARGEST, NOT_FINITE
from posttrain.rewards.scorer import Scorer, start_rewards
from posttrain.rewards.sources import ASK_A_SERVER
from posttrain.rewards.workers.limits import EXCEPTION


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
        return ScorerWithServers(served, rest, start_rewards(rest))
    except ConfigError as error:
        raise ConfigError([_at_its_place(problem, places) for problem in error.problems]) from error


def asks_a_server(term: RewardTerm) -> bool:
    return term.path is None and term.name in ASK_A_SERVER


class ScorerWithServers(Scorer):
    """Adds weight x value of the server terms to what the rest gives. A response that the rest could not score, or an
    earlier server term, is not asked about."""

    def __init__(self, served: Sequence[ServerTerm], config: RewardConfig, rest: Scorer):
        """``config`` is that of the rest."""
        self._served = tuple(served)
        self._config = config
        self._rest = rest

    def begin(self, group: TrajectoryGroup) -> None:
        if self._rest_has_a_say(group):
            self._rest.begin(group)

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        rest = iter(self._rest.score([group for group in groups if self._rest_has_a_say(group)]))
        outcomes: list[list[Outcome]] = [
            list(next(rest)) if self._rest_has_a_say(group) else [Reward(0.0)] * len(group.trajectories)
            for group in groups
        ]
        for term in self._served:
            places = [
                (row, column)
                for row, group in enumerate(groups)
                if _counts(term.data_sources, group)
                for column, outcome in enumerate(outcomes[row])
                if isinstance(outcome, Reward)
            ]
            asked = [(groups[row].prompt, groups[row].trajectories[column].text) for row, column in places]
            try:
                results = term.reward.score_many(asked)
            except Exception as error:  # noqa: BLE001 - such as a full disk under the cache; it is counted and shown
                results = [error] * len(asked)
            for (row, column), result in zip(places, results, strict=True):
                outcomes[row][column] = _added(outcomes[row][column], term, result)
        return [tuple(each) for each in outcomes]

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

    def close(self) -> None:
        self._rest.close()

    def _rest_has_a_say(self, group: TrajectoryGroup) -> bool:
        """Whether one of the other terms counts for a group; also where no term at all does, which they report."""
        served = any(_counts(term.data_sources, group) for term in self._served)
        return not served or any(_counts(frozenset(term.data_sources), group) for term in self._config.terms)


def _counts(data_sources: frozenset[str], group: TrajectoryGroup) -> bool:
    return not data_sources or group.prompt.data_source in data_sources


def _added(outcome: Outcome, term: ServerTerm, result: float | Exception) -> Outcome:
    assert isinstance(outcome, Reward)
    if isinstance(result, Exception):
        reason = result.reason if isinstance(result, NotScored) else EXCEPTION
        said = str(result) if isinstance(result, NotScored) else f"{type(result).__name__}: {result}"
        return Invalid(reason, f"{term.name}: {said}"[:500])
    total = outcome.value + term.weight * result
    if not abs(total) <= LARGEST:
        return Invalid(NOT_FINITE, f"the weighted sum is {total}")
    return Reward(total, (*outcome.terms, (term.name, result)))


def _load(config: RewardConfig) -> list[ServerTerm]:
    """Raises: ConfigError with the problems of all server terms. They are named after the others: a name used before becomes
    name_2."""
    names = Counter(term.name for term in config.terms if not asks_a_server(term))
    terms, problems = [], []
    for index, term in enumerate(config.terms):
        if not asks_a_server(term):
            continue
        names[term.name] += 1
        name = term.name if names[term.name] == 1 else f"{term.name}_{names[term.name]}"
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
