"""Validation between the steps of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.loops.rl_plan import RunPlan
from posttrain.run.clock import Clock
from posttrain.run.samples import write_samples
from posttrain.run.token_values import TokenTexts, first_groups
from posttrain.steps.assemble import assemble
from posttrain.steps.rl_step import collect
from posttrain.steps.score import score
from posttrain.steps.validate import validation_metrics


def validate(
    roles: Roles, scorer: GroupScorer, plan: RunPlan, step: int, folder: Path, clock: Clock, token_texts: TokenTexts
) -> dict[str, float]:
    """Sample and score the held-out prompts; every sample is written to validation/step_N.jsonl, with the values of its tokens
    beside it for as many as that file holds. Returns the metrics; none without held-out prompts."""
    if not plan.validation_prompts:
        return {}
    prompts, sampling = plan.validation_prompts, replace(plan.validation_sampling, step=step)
    logprobs = None
    players = replace(roles, worlds=roles.validation_worlds or roles.worlds)
    with clock.phase("validation", total=roles.most_tokens(len(prompts), sampling)):
        groups = collect(players, prompts, sampling, clock.advance, scorer.begin)
        scored = score(
            groups,
            scorer,
            reward_model=roles.reward_model,
            model_weight=plan.step.reward.model_weight,
            judges=roles.judges,
            judging=plan.step.reward.judges,
        )
        shown = first_groups(scored)
        batch = assemble(shown) if shown else None
        if batch and plan.validation_logprobs:
            # The sampler's log-probs of greedy tokens are those of temperature 1.
            logprobs = roles.policy.logprobs(batch.sequences, sampling.temperature or 1.0)
    file = folder / "validation" / f"step_{step}.jsonl"
    write_samples(
        file,
        step,
        scored,
        batch.sequences if batch else None,
        token_rewards=batch.turn_rewards if batch else None,
        trainer_logprobs=logprobs,
        token_texts=token_texts,
        read_rows=roles.read_rows,
    )
    return validation_metrics(scored)
