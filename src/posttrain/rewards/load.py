"""Construction of the reward functions named in a RewardConfig."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from posttrain.config.judge import judge_field, judge_role
from posttrain.config.reward import RewardConfig, RewardTerm
from posttrain.errors import ConfigError, Problem, RequestError, did_you_mean
from posttrain.interfaces.reward import BatchedRewardFn, RewardFn
from posttrain.rewards.algebra import REWARDS_BY_ALGEBRA
from posttrain.rewards.built_in import built_in
from posttrain.rewards.manager import TokenizerOf, check_manager, load_manager
from posttrain.rewards.options import RunWide
from posttrain.rewards.program import check_program, load_program
from posttrain.rewards.score import Decode, RewardTerms, Term
from posttrain.rewards.user import check_function, load_batched_function, load_function, own_place


def check_rewards(config: RewardConfig) -> list[Problem]:
    """Return the problems of the reward terms that can be found without running a user's file. Raises nothing."""
    return _try_all(config, partial(_check, run_wide=_run_wide(config)))[1]


def load_rewards(
    config: RewardConfig, decode: Decode | None = None, tokenizer: TokenizerOf | None = None
) -> RewardTerms:
    """Build the functions of a run's terms, in this process.

    Args: ``decode`` gives the text of token ids to terms that read the sequence; ``tokenizer`` loads that of
        reward managers.
    Raises: ConfigError with the problems of all terms.
    """
    rewards, problems = _try_all(config, partial(_load, run_wide=_run_wide(config), tokenizer=tokenizer))
    if problems:
        raise ConfigError(problems)
    terms = [
        replace(term, reward=reward, place=own_place(reward))
        for term, reward in zip(terms_of(config), rewards, strict=True)
    ]
    return RewardTerms(terms, may_be_none=config.model is not None, decode=decode)


def terms_of(config: RewardConfig) -> list[Term]:
    """Return the terms without their functions."""
    return [
        Term(
            name=name,
            weight=term.weight,
            reward=None,
            data_sources=frozenset(term.data_sources),
            batched=term.batched or term.kind != "function",
            calculates=term.path is None and term.name in REWARDS_BY_ALGEBRA,
            halve=term.halve_failed_batch and term.kind == "function",
            first=term.returns == "first",
            reads_sequence=term.reads == "sequence",
            reads_tokens=term.kind != "function",
        )
        for name, term in zip(_names(config.terms), config.terms, strict=True)
    ]


def check_data_sources(config: RewardConfig, sources: Mapping[str, str]) -> list[Problem]:
    """Check the data sources of a run's files, each mapped to the file that holds it. Returns the problems: a source that no
    term counts for, a source without a scorer in by_data_source, and a term for sources that no file holds. Raises nothing."""
    problems = []
    for source, file in sources.items():
        judged = any(source in (judge.data_sources or (source,)) for judge in config.judges.values())
        if config.model is None and not judged and not any(_counts_for(term, source) for term in config.terms):
            what = f"no reward term counts for data source {source!r} of {file}"
            fix = "add it to a term's data_sources, or add a term for it"
            problems.append(Problem(what, fix=fix, field="reward.terms"))
    for name, judge in config.judges.items():
        absent = [source for source in judge.data_sources if source not in sources]
        if sources and judge.data_sources and len(absent) == len(judge.data_sources):
            what = f"the {judge_role(name)} is for data sources that no file holds (they hold: {', '.join(sorted(sources))})"
            fix = did_you_mean(absent[0], list(sources), listed=True)
            problems.append(Problem(what, fix=fix, field=f"{judge_field(name)}.data_sources"))
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
    """Return True when ``check_data_sources`` can find problems in this configuration."""
    judged = any(judge.data_sources for judge in config.judges.values())
    return judged or any(
        term.data_sources or (term.name == "by_data_source" and term.path is None) for term in config.terms
    )


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


def _load(term: RewardTerm, *, run_wide: RunWide, tokenizer: TokenizerOf | None) -> RewardFn | BatchedRewardFn:
    if term.path and term.kind == "manager":
        return load_manager(term, tokenizer)
    if term.path and term.kind == "program":
        return load_program(term, tokenizer)
    if term.path:
        load = load_batched_function if term.batched else load_function
        return load(term.path, term.name, term.options, term.extra_info, term.judge_tokenizer)
    return built_in(term.name, term.options, run_wide)


def _check(term: RewardTerm, *, run_wide: RunWide) -> None:
    if term.path and term.kind == "manager":
        check_manager(term)
    elif term.path and term.kind == "program":
        check_program(term)
    elif term.path:
        check_function(
            term.path, term.name, term.options, batched=term.batched, has_judge=term.judge_tokenizer is not None
        )
    else:
        built_in(term.name, term.options, run_wide)


def _try_all(config: RewardConfig, make: Callable[[RewardTerm], Any]) -> tuple[list[Any], list[Problem]]:
    """Call ``make`` on every term. Returns: the results, and the problems of the failed terms with their config fields."""
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
    """Return the terms' names for metrics; repeated names become name_2, name_3."""
    seen: Counter[str] = Counter()
    names = []
    for term in terms:
        seen[term.name] += 1
        names.append(term.name if seen[term.name] == 1 else f"{term.name}_{seen[term.name]}")
    return names
