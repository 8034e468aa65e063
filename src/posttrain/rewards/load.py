"""From the names in a RewardConfig to the functions that score."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posttrain.config.reward import RewardConfig, RewardTerm
from posttrain.errors import ConfigError, Problem, RequestError, did_you_mean
from posttrain.interfaces.reward import RewardFn
from posttrain.registry import REWARDS
from posttrain.rewards.score import RewardTerms, Term
from posttrain.rewards.user import check_function, load_function


def check_rewards(config: RewardConfig) -> list[Problem]:
    """Everything wrong with the reward terms that can be seen without running a user's file. Nothing is raised."""
    return _try_all(config, _check)[1]


def load_rewards(config: RewardConfig) -> RewardTerms:
    """The scorer of a run.

    Raises: ConfigError with the problems of all terms.
    """
    rewards, problems = _try_all(config, _load)
    if problems:
        raise ConfigError(problems)
    names = _names(config.terms)
    return RewardTerms(
        [Term(name, term.weight, reward) for name, term, reward in zip(names, config.terms, rewards, strict=True)]
    )


def _load(term: RewardTerm) -> RewardFn:
    return load_function(term.path, term.name, term.options) if term.path else _built_in(term)


def _check(term: RewardTerm) -> None:
    if term.path:
        check_function(term.path, term.name)
    else:
        _built_in(term)


def _built_in(term: RewardTerm) -> RewardFn:
    """The registered factory, called with the term's options."""
    if term.name not in REWARDS.names():
        problem = REWARDS.problem(term.name)
        fix = "; ".join(filter(None, [problem.fix, "a function of your own needs path, the Python file that holds it"]))
        raise ConfigError(replace(problem, fix=fix))
    factory = REWARDS.get(term.name)
    known = list(inspect.signature(factory).parameters)
    unknown = [
        Problem(
            f"{term.name} has no option called {name!r} (known: {', '.join(known)})",
            fix=did_you_mean(name, known, listed=True),
            field=f"options.{name}",
        )
        for name in term.options
        if name not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    reward: RewardFn = factory(**term.options)
    return reward


def _try_all(config: RewardConfig, make: Callable[[RewardTerm], Any]) -> tuple[list[Any], list[Problem]]:
    """``make`` of every term, and the problems of those where it failed, with their place in the configuration."""
    made, problems = [], []
    for index, term in enumerate(config.terms):
        try:
            made.append(make(term))
        except RequestError as error:
            problems += [
                replace(problem, field=f"reward.terms.{index}.{problem.field or 'name'}") for problem in error.problems
            ]
    return made, problems


def _names(terms: list[RewardTerm]) -> list[str]:
    """The terms' names for metrics; a name used again becomes name_2, name_3."""
    seen: Counter[str] = Counter()
    names = []
    for term in terms:
        seen[term.name] += 1
        names.append(term.name if seen[term.name] == 1 else f"{term.name}_{seen[term.name]}")
    return names
