"""Rules between the keys of the reward and of the group filter."""

from __future__ import annotations

import re
from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.config.environment import SINGLE_TURN
from posttrain.config.group_filter import GroupFilterConfig
from posttrain.config.judge import JUDGE, JudgeConfig, judge_field
from posttrain.config.reward_placement import WORKER_FIELDS, runs_code, runs_here
from posttrain.errors import Problem, did_you_mean
from posttrain.registry import ADVANTAGES, REWARDS, ROLLOUT_ENGINES

BOUNDS = ("above_std", "above_mean", "below_mean", "below_tokens")
_TAKEN = ("model", "environment", "overlong", "reward", "")


def reward_problems(config: RunConfig) -> Iterator[Problem]:
    """Report invalid settings."""
    reward, samples = config.reward, config.rollout.samples_per_prompt
    worlds = config.environment.used and config.environment.name != SINGLE_TURN
    if not reward.terms and reward.model is None and not reward.judges and not worlds and not config.distillation.alone:
        yield Problem(
            "there is nothing to score responses by: no reward term and no reward model",
            fix="add a term, such as reward.terms=[{name: exact_match}], or reward.model.path",
            field="reward.terms",
        )
    if reward.model is not None and any(term.name == "model" for term in reward.terms):
        yield Problem(
            "a reward term is called model, which is the name of the reward model's score",
            fix="give the term's function another name",
            field="reward.terms",
        )
    if JUDGE in reward.more_judges:
        yield Problem(
            "a further judge is called judge, which is the name of reward.judge",
            fix="give it another name, such as that of its domain",
            field=f"reward.more_judges.{JUDGE}",
        )
    for name, judge in reward.judges.items():
        yield from _judge_problems(config, name, judge)
    yield from _served_problems(config)
    for index, term in enumerate(reward.terms):
        if term.batched and term.path is None:
            yield Problem(
                f"{term.name} scores one response at a time: batched is for a function of your own",
                fix="leave batched out, or name the function's file with path",
                field=f"reward.terms.{index}.batched",
            )
    limit = config.rollout.max_response_tokens
    if reward.overlong_buffer_tokens is not None and reward.overlong_buffer_tokens > limit:
        yield Problem(
            f"the overlong buffer of {reward.overlong_buffer_tokens} tokens is longer than the longest response of {limit}",
            fix=f"use fewer, such as reward.overlong_buffer_tokens={max(limit // 4, 1)}, or longer responses",
            field="reward.overlong_buffer_tokens",
        )
    for name in ("normalize_mean", "normalize_std"):
        if getattr(reward, name) == "group" and samples == 1:
            yield Problem(
                f"reward.{name}=group with 1 sample per prompt makes every reward 0",
                fix=f"use reward.{name}=batch, or more samples, such as rollout.samples_per_prompt=8",
                field=f"reward.{name}",
            )
    for at, chosen in _filters(config).items():
        if chosen.strategy != "none":
            yield from _filter_problems(config, chosen, at)


def _served_problems(config: RunConfig) -> Iterator[Problem]:
    """Report a model that is served for functions that are not there."""
    served = config.reward.served
    if served is not None and not any(term.path and term.kind == "function" for term in config.reward.terms):
        what = "the run serves a model for reward functions of yours, and no term has one"
        fix = "name the file of a function (reward.terms: [{name: ..., path: ...}]), or leave reward.served out"
        yield Problem(what, fix=fix, field="reward.served")


def _judge_problems(config: RunConfig, name: str, judge: JudgeConfig) -> Iterator[Problem]:
    at = judge_field(name)
    if any(term.name == name for term in config.reward.terms):
        yield Problem(
            f"a reward term is called {name}, which is the name of {'the' if name == JUDGE else 'a'} judge's verdict",
            fix="give the term's function another name" if name == JUDGE else "give the judge another name",
            field="reward.terms" if name == JUDGE else at,
        )
    if at != f"reward.{JUDGE}" and (name in _TAKEN or "/" in name):
        yield Problem(
            f"a judge cannot be called {name}: samples and metrics have another meaning for that name",
            fix="give it another name, such as that of its domain",
            field=at,
        )
    if judge.engine not in ROLLOUT_ENGINES.names() or judge.engine == "http":
        known = [name for name in ROLLOUT_ENGINES.names() if name != "http"]
        yield Problem(
            f"there is no sampler {judge.engine} for a judge (known: {', '.join(known)})",
            fix=did_you_mean(judge.engine, known, listed=True)
            or "a judge behind a server is the reward term llm_judge",
            field=f"{at}.engine",
        )


def _filters(config: RunConfig) -> dict[str, GroupFilterConfig]:
    """Return the run's filter and those of domains, by their fields."""
    domains = config.data.domains.items()
    own = {f"data.domains.{name}.group_filter": each.group_filter for name, each in domains if each.group_filter}
    return {"group_filter": config.group_filter} | own


def _filter_problems(config: RunConfig, chosen: GroupFilterConfig, at: str) -> Iterator[Problem]:
    if chosen.above_mean is not None and chosen.below_mean is not None and chosen.above_mean >= chosen.below_mean:
        yield Problem(
            f"no group has a mean above {chosen.above_mean:g} and below {chosen.below_mean:g}",
            fix=f"set {at}.above_mean lower than {at}.below_mean",
            field=f"{at}.above_mean",
        )
    if chosen.strategy == "prefer" and (config.asynchronous.is_on or config.data.domains):
        cause = "data.domains" if config.data.domains else f"asynchronous.mode={config.asynchronous.mode}"
        yield Problem(
            f"{at}.strategy=prefer chooses among whole batches of prompts, and with {cause} groups come one by one",
            fix=f"use {at}.strategy=refill, or remove {cause.partition('=')[0]}",
            field=f"{at}.strategy",
        )
    known = [
        "reward",
        *(term.name for term in config.reward.terms),
        *(["model"] if config.reward.model else []),
        *config.reward.judges,
    ]
    looked_at = chosen.metric.split("/")[0]  # a term may give further numbers, as name/key
    # A repeated name becomes name_2.
    if looked_at not in known and re.sub(r"_\d+$", "", looked_at) not in known:
        yield Problem(
            f"the group filter looks at {chosen.metric}, which is no term of the reward (known: {', '.join(known)})",
            fix=did_you_mean(chosen.metric, known, listed=True),
            field=f"{at}.metric",
        )


def reward_warnings(config: RunConfig) -> Iterator[str]:
    """Report settings that have no effect, in sentences."""
    reward, advantage = config.reward, config.advantage
    if runs_here(reward):
        for name in WORKER_FIELDS:
            if getattr(reward, name) != type(reward).model_fields[name].default:
                yield f"reward.{name} has no effect: these rewards are scored in the process that trains (docs/rewards.md)"
    if reward.overlong_buffer_tokens is None and reward.overlong_penalty != 1:
        yield "reward.overlong_penalty has no effect: reward.overlong_buffer_tokens is not given"
    if reward.overlong_buffer_tokens is not None and reward.overlong_penalty == 0:
        yield "reward.overlong_buffer_tokens has no effect: reward.overlong_penalty is 0"
    if reward.kl.coef == 0:
        default = type(reward.kl)()
        for name in ("estimator", "target", "horizon_sequences"):
            if getattr(reward.kl, name) != getattr(default, name):
                yield f"reward.kl.{name} has no effect: reward.kl.coef is 0"
    elif reward.kl.target is None and reward.kl.horizon_sequences != type(reward.kl)().horizon_sequences:
        yield "reward.kl.horizon_sequences has no effect: without reward.kl.target the weight stays"
    if reward.kl.coef and reward.kl.estimator.endswith("+"):
        yield f"the + of reward.kl.estimator={reward.kl.estimator} has no effect: it is about gradients, and rewards have none"
    normalized = [name for name in ("normalize_mean", "normalize_std") if getattr(reward, name) != "none"]
    chosen = advantage.settings
    standardizes = advantage.about.facts.standardizes_groups and chosen["normalize_by_std"]
    undone = standardizes and reward.clip is None and reward.kl.coef == 0
    if normalized and undone and not chosen.get("lone_sample_keeps_reward", False):
        names = " and ".join(f"reward.{name}" for name in normalized)
        have = "have" if len(normalized) > 1 else "has"
        yield (
            f"{names} {have} no effect: {advantage.name} brings each group's rewards to mean 0 and standard deviation 1 in any "
            "case"
        )
    inputs = advantage.about.inputs
    if advantage.whiten_rewards and inputs and "token_rewards" not in inputs:
        readers = ", ".join(ADVANTAGES.taking("token_rewards"))
        yield f"advantage.whiten_rewards has no effect: {advantage.name} reads no token rewards ({readers} would)"
    if reward.allow_unboxed_code and not runs_code(reward):
        may = ", ".join(REWARDS.stating("runs_code"))
        yield f"reward.allow_unboxed_code has no effect: no term runs code ({may} may)"
    for at, each in _filters(config).items():
        yield from _filter_warnings(config, each, at)


def _filter_warnings(config: RunConfig, chosen: GroupFilterConfig, at: str) -> Iterator[str]:
    default = GroupFilterConfig()
    changed = {name for name in GroupFilterConfig.model_fields if getattr(chosen, name) != getattr(default, name)}
    readers = {
        "none": set[str](),
        "drop": {"metric", *BOUNDS},
        "mask": {"metric", *BOUNDS},
        "refill": {"metric", *BOUNDS, "max_batches"},
        "replace": {"metric", *BOUNDS, "max_batches", "min_kept_share"},
        "prefer": {"metric", *BOUNDS, "oversample"},
    }[chosen.strategy]
    for name in sorted(changed - readers - {"strategy"}):
        yield f"{at}.{name} has no effect: {at}.strategy is {chosen.strategy}"
    if chosen.strategy == "none":
        return
    means = chosen.above_mean is not None or chosen.below_mean is not None
    if chosen.above_std is None and not means and chosen.below_tokens is None:
        yield (f"{at}.strategy={chosen.strategy} asks nothing of a group but one valid reward: no bound is given")
    if chosen.above_std is not None and config.rollout.samples_per_prompt == 1:
        yield f"{at}.above_std has no effect: with 1 sample per prompt a group has no standard deviation"
