"""Names of engines, rewards, trackers, estimators and losses that a configuration chooses: each must be known.

Nothing here imports what it names; of all files, only those with an estimator or a loss of the user's own are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from posttrain.config import RunConfig
from posttrain.config.algorithm import AlgorithmSection, LossConfig
from posttrain.errors import Problem, RequestError, did_you_mean
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, REWARDS, ROLLOUT_ENGINES, TRACKERS, TRAIN_ENGINES, Registry

# Algorithms that papers and other trainers call by one name, and that are several settings here.
RECIPES = {
    "dapo": "advantage.name=grpo loss.name=ppo_clip loss.clip_ratio_high=0.28 group_filter.strategy=refill",
    "dr_grpo": "advantage.name=grpo advantage.normalize_by_std=false loss.name=ppo_clip "
    "loss.aggregation=sequence_mean_token_sum_norm",
    "gmpo": "advantage.name=grpo loss.name=geo_mean loss.aggregation=sequence_mean_token_mean",
    "ppo": "advantage.name=gae loss.name=ppo_clip",
    "reinforce++": "advantage.name=reinforce_plus_plus loss.name=ppo_clip",
    "reinforce_pp": "advantage.name=reinforce_plus_plus loss.name=ppo_clip",
    "vanilla": "loss.name=ppo_clip",
    "regular": "loss.name=ppo_clip",
}


def name_problems(config: RunConfig) -> Iterator[Problem]:
    """Report every name that is not known, and what is wrong with algorithms in the user's own files."""
    chosen: list[tuple[Registry[Any], str, str]] = [
        (TRAIN_ENGINES, config.policy.engine, "policy.engine"),
        (TRAIN_ENGINES, config.critic.engine, "critic.engine"),
        (ROLLOUT_ENGINES, config.rollout.engine, "rollout.engine"),
    ]
    for index, term in enumerate(config.reward.terms):
        if term.path is None:  # otherwise the name is a function in the user's file
            chosen.append((REWARDS, term.name, f"reward.terms.{index}.name"))
    for index, name in enumerate(config.tracking.trackers):
        chosen.append((TRACKERS, name, f"tracking.trackers.{index}"))
    algorithms: tuple[tuple[str, AlgorithmSection], ...] = (("advantage", config.advantage), ("loss", config.loss))
    for section, own in algorithms:
        if own.path is None:
            chosen.append((own.registry, own.name, f"{section}.name"))
        else:
            yield from _own_problems(section, own)
    for registry, name, field in chosen:
        if name not in registry.names():
            yield _as_in_papers(registry, name, field) or registry.problem(name, field)


def _as_in_papers(registry: Registry[Any], name: str, field: str) -> Problem | None:
    """An algorithm's name in a place or a spelling that is not ours: an estimator given as the loss, a loss as the estimator, a
    paper's name for several settings, capital letters."""
    plain = name.lower().replace("-", "_").replace(" ", "_")
    if registry is POLICY_LOSSES and plain in ADVANTAGES.names():
        fix = f"use advantage.name={plain} loss.name=ppo_clip: {plain} trains with that loss"
        return Problem(f"{name} is an advantage estimator, not a policy loss", fix=fix, field=field)
    if registry is ADVANTAGES and plain in POLICY_LOSSES.names():
        fix = f"use loss.name={plain}, and an estimator such as advantage.name=grpo"
        return Problem(f"{name} is a policy loss, not an advantage estimator", fix=fix, field=field)
    if plain in registry.names():
        return Problem(f"there is no {registry.kind} called {name!r}", fix=f"write {plain}", field=field)
    if registry in (ADVANTAGES, POLICY_LOSSES) and plain in RECIPES:
        what = f"there is no {registry.kind} called {name!r}: it is several settings here"
        return Problem(what, fix=f"use {RECIPES[plain]} (docs/algorithms.md)", field=field)
    return None


def _own_problems(section: str, own: AlgorithmSection) -> Iterator[Problem]:
    """Yield what is wrong with an estimator or loss in the user's own file, which is read and not run."""
    try:
        described = own.registry.describe(own.name, own.path)
    except RequestError as error:
        yield from (replace(problem, field=f"{section}.{problem.field or 'name'}") for problem in error.problems)
        return
    theirs = own.registry.written_for_verl(own.name, own.path) if own.path else None
    if theirs is not None:
        for name in theirs.unknown:
            if theirs.in_trainer is not None:
                what = (
                    f"line {theirs.in_trainer.line} of {own.path} reads {name} of its batch, which is not computed here"
                )
                yield Problem(what, fix="choose another estimator, such as grpo", field=f"{section}.name")
                continue
            what = f"{theirs.definition.name} in {own.path} takes {name}, which its own trainer computes and this one does not"
            fix = f"write it without {name}, give that a default, or make it a number (it is annotated as a tensor)"
            yield Problem(what, fix=fix, field=f"{section}.name")
        if isinstance(own, LossConfig) and own.rollout_correction.weights != "none" and theirs.weighs_at:
            what = (
                f"line {theirs.weighs_at} of {own.path} uses the weights of rollout correction otherwise than as a factor; here "
                f"{theirs.definition.name} gets None, and its loss is multiplied by them"
            )
            fix = "multiply the loss by them in it, or leave the weights out: weights none"
            yield Problem(what, fix=fix, field=f"{section}.rollout_correction.weights")
        return
    known = own.registry.all_inputs()
    for name in described.inputs:
        if name not in known:
            yield Problem(
                f"{own.name} in {own.path} takes {name}, which is no input of a {own.registry.kind} "
                f"(known: {', '.join(known)})",
                fix=did_you_mean(name, known, listed=True) or "a setting of your own stands behind a *",
                field=f"{section}.name",
            )
    if described.takes_more:
        what = f"{own.name} in {own.path} takes **keywords, so its settings have no names"
        yield Problem(what, fix="write each setting as a keyword-only parameter", field=f"{section}.name")
