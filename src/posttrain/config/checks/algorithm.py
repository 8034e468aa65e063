"""Rules between the keys of advantages, losses and rollout correction."""

from __future__ import annotations

import re
from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.config.algorithm import RolloutCorrectionConfig
from posttrain.config.rejection import RULES, rejection_rules
from posttrain.config.roles import several_updates
from posttrain.errors import Problem, did_you_mean

# What shapes the sum of an episode's reward, and how it is turned off.
SHAPES = (("zero_unless_stopped", False), ("normalize_mean", "none"), ("normalize_std", "none"), ("clip", None))
_CORRECTION = "loss.rollout_correction"


def algorithm_problems(config: RunConfig) -> Iterator[Problem]:
    """Report invalid settings."""
    yield from _correction_problems(config)
    loss = config.loss
    if loss.kl_importance_weighted and loss.kl_estimator not in ("k1", "k3"):
        yield Problem(
            f"loss.kl_importance_weighted makes an estimate of k1 or k3 unbiased; loss.kl_estimator is {loss.kl_estimator}",
            fix="use loss.kl_estimator=k3, or loss.kl_importance_weighted=false",
            field="loss.kl_importance_weighted",
        )
    low, high = (loss.settings.get(f"covariance_{end}") for end in ("low", "high"))
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        yield Problem(
            f"no covariance is above loss.covariance_low={low:g} and below loss.covariance_high={high:g}",
            fix="use 1 and 5, for example",
            field="loss.covariance_high",
        )
    inputs = config.advantage.about.inputs
    if {"terms", "term_weights"} <= set(config.advantage.settings):
        yield from _term_problems(config)
    if "trajectory_index" in inputs:  # its rows are turns
        yield from _step_problems(config)
    yield from _pair_problems(config)
    reward = config.reward
    normalized = [name for name in ("normalize_mean", "normalize_std") if getattr(reward, name) != "none"]
    if "greedy_rewards" in inputs and normalized:
        yield Problem(
            f"{config.advantage.name} compares rewards with that of a greedy response, and reward.{normalized[0]} "
            "changes the ones and not the other",
            fix=f"use reward.{normalized[0]}=none, or another estimator",
            field=f"reward.{normalized[0]}",
        )


def _pair_problems(config: RunConfig) -> Iterator[Problem]:
    """Estimators that compare neighbours, by weights of the policy before the update."""
    name, facts = config.advantage.name, config.advantage.about.facts
    prompts, samples = config.data.prompts_per_step, config.rollout.samples_per_prompt
    if facts.one_update and several_updates(config):
        epochs = config.policy.epochs_per_step > 1
        field = "policy.epochs_per_step" if epochs else "policy.sequences_per_mini_batch"
        yield Problem(
            f"{name} weighs responses by the policy before the update, and a step makes several updates",
            fix=f"use {field}={1 if epochs else prompts * samples}",
            field=field,
        )
    if facts.pairs and samples > 1 and samples % 2:
        what = f"{name} compares two responses to a prompt, and each has {samples}"
        field = "rollout.samples_per_prompt"
        yield Problem(what, fix=f"use {field}=2, or another even number", field=field)
    elif facts.pairs and prompts * samples % 2:
        what = f"{name} compares neighbours, and a step has {prompts * samples} responses: the last one has none"
        yield Problem(what, fix=f"use data.prompts_per_step={prompts + 1}", field="data.prompts_per_step")


def _step_problems(config: RunConfig) -> Iterator[Problem]:
    """Estimators that look at the turns of an episode one by one."""
    name, environment = config.advantage.name, config.environment
    if not environment.used:
        yield Problem(
            f"{name} compares the turns of episodes, and this run has no environment",
            fix="name one (environment.name), or choose another estimator, such as advantage.name=grpo",
            field="advantage.name",
        )
    elif not environment.sample_per_turn:
        yield Problem(
            f"{name} needs every turn as a sample of its own",
            fix="use environment.sample_per_turn=true, or another estimator, such as advantage.name=grpo",
            field="environment.sample_per_turn",
        )
    if config.reward.kl.coef:
        yield Problem(
            f"{name} reads the rewards of turns as the environment gave them, without a KL",
            fix="use loss.kl_coef instead of reward.kl.coef",
            field="reward.kl.coef",
        )
    for field, off in SHAPES:
        if getattr(config.reward, field) != off:
            why = f"reward.{field} would change the episode's alone"
            what = f"{name} reads the rewards of turns as the environment gave them, and {why}"
            fix = f"use reward.{field}={'null' if off is None else str(off).lower()}"
            yield Problem(what, fix=fix, field=f"reward.{field}")


def _correction_problems(config: RunConfig) -> Iterator[Problem]:
    correction, loss = config.loss.rollout_correction, config.loss.name
    low, high = correction.weight_low, correction.weight_high
    if low is not None and low > high:
        yield Problem(
            f"{_CORRECTION}.weight_low = {low:g} is above weight_high = {high:g}, so every weight would be 0",
            fix=f"use a {_CORRECTION}.weight_low below weight_high",
            field=f"{_CORRECTION}.weight_low",
        )
    if correction.reject and not correction.reject_bounds:
        yield Problem(
            f"{_CORRECTION}.reject has no bounds",
            fix=f"give one bound for all rules or one for each, such as {_CORRECTION}.reject_bounds=['2.0']",
            field=f"{_CORRECTION}.reject_bounds",
        )
    elif correction.reject:
        try:
            rejection_rules(correction.reject, correction.reject_bounds)
        except ValueError as error:
            unknown = [name for name in correction.reject if name not in RULES]
            fix = did_you_mean(unknown[0], list(RULES), listed=True) if unknown else ""
            yield Problem(
                str(error),
                fix=fix
                or "an upper bound above 0, or for k1 and difference lower_upper with the lower one below, such as 0.5_2",
                field=f"{_CORRECTION}.{'reject' if unknown else 'reject_bounds'}",
            )
    if correction.weights != "none" and "rollout_logprobs" in config.loss.about.inputs:
        yield Problem(
            f"the ratio of {loss} is to the sampler already, and {_CORRECTION}.weights would correct the gap twice",
            fix=f"use {_CORRECTION}.weights=none, or another loss, such as ppo_clip or gpg",
            field=f"{_CORRECTION}.weights",
        )
    elif correction.weights != "none" and correction.use_rollout_logprobs and config.loss.about.facts.has_ratio:
        yield Problem(
            f"with {_CORRECTION}.use_rollout_logprobs the ratio of {loss} is to the sampler, and {_CORRECTION}.weights would "
            "correct the gap twice",
            fix="use one of them, or a loss without a ratio: loss.name=gpg",
            field=f"{_CORRECTION}.weights",
        )
    if correction.proximal == "loglinear":
        yield from _interpolation_problems(config)


def _interpolation_problems(config: RunConfig) -> Iterator[Problem]:
    """Report settings that need log-probs from before the update, where these are interpolated in it."""
    correction, loss = config.loss.rollout_correction, config.loss
    field = f"{_CORRECTION}.proximal"
    recompute = f"{field}=recompute"
    if correction.weights == "none":
        yield Problem(
            f"{field}=loglinear interpolates the log-probs that {_CORRECTION}.weights are made of, and there are none",
            fix=f"use {_CORRECTION}.weights=token, or {recompute}",
            field=field,
        )
    elif not (loss.about.facts.has_ratio and "old_logprobs" in loss.about.inputs):
        yield Problem(
            f"{loss.name} has no ratio to the policy at the start of the step, which {field}=loglinear interpolates",
            fix=f"use {recompute}, or a loss with a ratio, such as loss.name=ppo_clip",
            field=field,
        )
    for name, given, why in (
        ("reject", bool(correction.reject), "rules compare the log-probs of the whole step before its first update"),
        (
            "normalize",
            correction.normalize,
            "the mean of the weights is over the whole step, and these are the update's",
        ),
    ):
        if given:
            yield Problem(
                f"{_CORRECTION}.{name} needs the log-probs that {field}=loglinear leaves out: {why}",
                fix=f"use {recompute}, or remove {_CORRECTION}.{name}",
                field=field,
            )


def _term_problems(config: RunConfig) -> Iterator[Problem]:
    reward = config.reward
    chosen, weights = config.advantage.settings["terms"], config.advantage.settings["term_weights"]
    known = [term.name for term in reward.terms]
    known += [
        *(["model"] if reward.model else []),
        *reward.judges,
        *(["overlong"] if reward.overlong_buffer_tokens else []),
    ]
    for name in chosen:
        base = name.split("/")[0]  # a term may give further numbers, as name/key
        # A repeated name becomes name_2.
        if base not in known and re.sub(r"_\d+$", "", base) not in known:
            yield Problem(
                f"advantage.terms names {name}, which is no term of the reward (known: {', '.join(known)})",
                fix=did_you_mean(name, known, listed=True),
                field="advantage.terms",
            )
    terms = len(chosen or known)
    if weights and len(weights) != terms:
        yield Problem(
            f"advantage.term_weights has {len(weights)} numbers for {terms} terms",
            fix="give one for each term, in their order",
            field="advantage.term_weights",
        )


def algorithm_warnings(config: RunConfig) -> Iterator[str]:
    """Report settings that have no effect, and groups without a baseline, in sentences."""
    correction, default = config.loss.rollout_correction, RolloutCorrectionConfig()
    if correction.weights == "none":
        for name in ("weight_high", "weight_low", "normalize"):
            if getattr(correction, name) != getattr(default, name):
                yield f"{_CORRECTION}.{name} has no effect: {_CORRECTION}.weights is none"
    if correction.reject_bounds and not correction.reject:
        yield f"{_CORRECTION}.reject_bounds has no effect: {_CORRECTION}.reject names no rule"
    if config.loss.norm_tokens is not None and config.loss.aggregation != "sequence_mean_token_sum_norm":
        yield f"loss.norm_tokens has no effect: loss.aggregation is {config.loss.aggregation}"
    resampling = config.resampling
    if resampling.weights != "power" and resampling.exponent != type(resampling).model_fields["exponent"].default:
        yield f"resampling.exponent has no effect: resampling.weights is {resampling.weights}, not power"
    if resampling.multiple_of is not None and resampling.fit == "none":
        yield "resampling.multiple_of has no effect: resampling.fit is none"
    inputs = config.loss.about.inputs
    if inputs and "advantages" not in inputs:
        yield f"advantage.name has no effect: {config.loss.name} does not read advantages"
    elif "reward_terms" in config.advantage.about.inputs:
        yield from _unshaped(config)
    yield from _alone_in_its_group(config)
    meant = config.advantage.about.facts.aggregation
    if meant and config.loss.aggregation != meant and not config.distillation.alone:
        yield f"{config.advantage.name} is its source's with loss.aggregation={meant}, and it is {config.loss.aggregation}"


def _alone_in_its_group(config: RunConfig) -> Iterator[str]:
    """Report groups of one response whose reward stands for the comparison that the estimator makes."""
    chosen = config.advantage
    compares = chosen.about.facts.compares_responses and not config.distillation.alone
    keeps = chosen.settings.get("lone_sample_keeps_reward", False)
    if compares and keeps and config.rollout.samples_per_prompt == 1:
        yield (
            f"a group of one has no baseline: {chosen.name} compares the responses to a prompt, and with "
            "rollout.samples_per_prompt=1 there is nothing to subtract from a response's reward, as in verl and SkyRL; "
            "sample several, such as 8"
        )


def _unshaped(config: RunConfig) -> Iterator[str]:
    """Report settings that shape the sum of the reward, for an estimator that reads its terms."""
    reward = config.reward
    for name, off in SHAPES:
        if getattr(reward, name) != off:
            yield f"reward.{name} has no effect: {config.advantage.name} reads the terms of the reward, not their sum"
    if reward.kl.coef:
        yield f"reward.kl.coef has no effect: {config.advantage.name} reads the terms of the reward, not their sum"
