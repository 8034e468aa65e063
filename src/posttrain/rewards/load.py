"""From the names in a RewardConfig to the functions that score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from posttrain.config.reward import RewardConfig, RewardTerm
from posttrain.errors import ConfigError, Problem, RequestError, did_you_mean
from posttrain.interfaces.reward import BatchedRewardFn, RewardFn
from posttrain.rewards.built_in import built_in
from posttrain.rewards.options import RunWide
from posttrain.rewards.score import RewardTerms, Term
from posttrain.rewards.user import check_function, load_batched_function, load_function


def check_rewards(config: RewardConfig) -> list[Problem]:
    """Everything wrong with the reward terms that can be seen without running a user's file. Nothing is raised."""
    return _try_all(config, partial(_check, run_wide=_run_wide(config)))[1]


def load_rewards(config: RewardConfig) -> RewardTerms:
    """The functions of a run's terms, in this process.

    Raises: ConfigError with the problems of all terms.
    """
    rewards, problems = _try_all(config, partial(_load, run_wide=_run_wide(config)))
    if problems:
        raise ConfigError(problems)
    terms = [replace(term, reward=reward) for term, reward in zip(terms_of(config), rewards, strict=True)]
    return RewardTerms(terms, may_be_none=config.model is not None)


def terms_of(config: RewardConfig) -> list[Term]:
    """The terms without their functions."""
    return [
        Term(name, term.weight, None, frozenset(term.data_sources), term.batched, term.halve_failed_batch)
        for name, term in zip(_names(config.terms), config.terms, strict=True)
    ]


def check_data_sources(config: RewardConfig, sources: Mapping[str, str]) -> list[Problem]:
    """What cannot be scored of the data sources (and the file that each was found in) of a run's files: one that no term
    counts for, one that by_data_source has no scorer for, and a term that is for none of them. Nothing is raised."""
    problems = []
    for source, file in sources.items():
        if config.model is None and not any(_counts_for(term, source) for term in config.terms):
            what = f"no reward term counts for data source {source!r} of {file}"
            fix = "add it to a term's data_sources, or add a term for it"
            problems.append(Problem(what, fix=fix, field="reward.terms"))
    for index, term in enumerate(config.terms):
        place = f"reward.terms.{index}"
        if term.data_sources and sources and not any(_counts_for(term, source) for source in sources):
            what = (
                f"the term {term.name} is for data sources that no file holds (they hold: {', '.join(sorted(sources))})"
            )
            fix = did_you_mean(term.data_sources[0], list(sources), listed=True)
            problems.append(Problem(what, fix=fix, field=f"{place}.data_sources"))
        if term.name == "by_data_source" and term.path is None:
            problems += _unroutable(term, place, sources, _run_wide(config))
    return problems


def needs_data_sources(config: RewardConfig) -> bool:
    """Whether ``check_data_sources`` has anything to say about this configuration."""
    return any(term.data_sources or (term.name == "by_data_source" and term.path is None) for term in config.terms)


def _run_wide(config: RewardConfig) -> RunWide:
    return RunWide(
        allow_unboxed_code=config.allow_unboxed_code, timeout_s=config.timeout_s, memory_gib=config.memory_gib
    )


def _counts_for(term: RewardTerm, source: str) -> bool:
    return not term.data_sources or source in term.data_sources


def _unroutable(term: RewardTerm, place: str, sources: Mapping[str, str], run_wide: RunWide) -> list[Problem]:
    try:
        dispatch: Any = built_in(term.name, term.options, run_wide)
    except RequestError:  # reported by check_rewards
        return []
    problems = []
    for source, file in sources.items():
        try:
            if _counts_for(term, source):
                dispatch.check(source)
        except RequestError as error:
            problems += [
                replace(problem, what=f"{problem.what}, in {file}", field=f"{place}.name") for problem in error.problems
            ]
    return problems


def _load(term: RewardTerm, *, run_wide: RunWide) -> RewardFn | BatchedRewardFn:
    if term.path:
        return (load_batched_function if term.batched else load_function)(term.path, term.name, term.options)
    return built_in(term.name, term.options, run_wide)


def _check(term: RewardTerm, *, run_wide: RunWide) -> None:
    if term.path:
        check_function(term.path, term.name)
    else:
        built_in(term.name, term.options, run_wide)


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
