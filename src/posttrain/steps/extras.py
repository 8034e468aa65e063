"""Inputs of single advantage estimators, computed only where the chosen one names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import Problem, RequestError
from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.train_engine import ScoresTogether, ScoringEngine, TrainEngine
from posttrain.records.batches import ScoredBatch, SequenceBatch
from posttrain.records.plans import StepPlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, ScoredGroup, TrajectoryGroup
from posttrain.steps.advantage import inputs_of
from posttrain.steps.score import score
from posttrain.steps.shape_rewards import shape_outcomes
from posttrain.steps.turns import STATE_TEXTS, with_turns_as_responses
from posttrain.verl_functions import COLUMN

Collect = Callable[..., list[TrajectoryGroup]]  # rl_step.collect


def add_greedy_rewards(
    batch: ScoredBatch,
    groups: Sequence[ScoredGroup],
    roles: Roles,
    scorer: GroupScorer,
    plan: StepPlan,
    clock: PhaseClock,
    collect: Collect,
) -> ScoredBatch:
    """The batch of these groups with the baseline of ReMax: the reward of one greedy response to each of their prompts, scored
    and clipped like the sampled ones; NaN where it has no valid reward. Unchanged unless the estimator names greedy_rewards.

    Source: arXiv:2310.10505, algorithm 1.
    """
    if "greedy_rewards" not in inputs_of(plan.advantage):
        return batch
    prompts = {group.group.prompt.prompt_id: group.group.prompt for group in groups}
    greedy = replace(
        plan.sampling,
        samples_per_prompt=1,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        first_token_temperature=None,
    )
    with clock.phase("baseline", total=roles.most_tokens(len(groups), greedy)):
        sampled = collect(roles, list(prompts.values()), greedy, clock.advance, scorer.begin)
        scored = score(
            sampled,
            scorer,
            reward_model=roles.reward_model,
            model_weight=plan.reward.model_weight,
            judges=roles.judges,
            judging=plan.reward.judges,
        )
    rewards = {
        prompt_id: outcome.value if isinstance(outcome, Reward) else float("nan")
        for prompt_id, group in zip(prompts, shape_outcomes(scored, plan.reward), strict=True)
        for outcome in group.outcomes
    }
    by_group = torch.tensor([rewards[group.group.prompt.prompt_id] for group in groups])
    if plan.reward.clip is not None:
        by_group = by_group.clamp(-plan.reward.clip, plan.reward.clip)
    return replace(batch, extras={**batch.extras, "greedy_rewards": by_group[batch.sequences.group_index]})


def add_sum_pi_squared(batch: ScoredBatch, policy: ScoringEngine, plan: StepPlan) -> ScoredBatch:
    """The batch with the sum of the squared probabilities of the whole vocabulary at every response token, by the policy before
    the update. Unchanged unless the estimator names sum_pi_squared."""
    if "sum_pi_squared" not in inputs_of(plan.advantage):
        return batch
    found = policy.sum_pi_squared(batch.sequences, plan.update.loss.temperature)
    return replace(batch, extras={**batch.extras, "sum_pi_squared": found})


def add_columns(batch: ScoredBatch, groups: Sequence[ScoredGroup], plan: StepPlan) -> ScoredBatch:
    """The batch as the estimator reads it: every turn a trajectory of its own where a turn is a response, and with the columns of
    the data that an estimator written for verl reads: B values of each row's prompt.

    Raises: RequestError when a prompt does not have one.
    """
    if plan.turn_is_response:
        texts = STATE_TEXTS in inputs_of(plan.advantage)
        batch = with_turns_as_responses(batch, groups, plan.similar_states, texts=texts)
    columns = [name.removeprefix(COLUMN) for name in inputs_of(plan.advantage) if name.startswith(COLUMN)]
    if not columns:
        return batch
    rows = batch.sequences.group_index.tolist()
    by_group = [{name: _value_of(group.group.prompt, name) for name in columns} for group in groups]
    found = {f"{COLUMN}{name}": tuple(by_group[row][name] for row in rows) for name in columns}
    return replace(batch, extras={**batch.extras, **found})


def _value_of(prompt: Prompt, column: str) -> Any:
    if column == "data_source":
        return prompt.data_source
    if column == "extra_info":
        return prompt.extra_info
    if column in prompt.extra_info:
        return prompt.extra_info[column]
    what = f"the advantage estimator reads the column {column}, which the row of {prompt.prompt_id} does not have"
    raise RequestError(Problem(what, fix="name a column of the data in data.extra_columns", field="data.extra_columns"))


def old_and_reference(
    batch: SequenceBatch, policy: TrainEngine, reference: ScoringEngine | None, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """log pi_old and log pi_ref, [B, T] nats, in one call where both models are in the same processes; None without a reference,
    or where it needs a call of its own."""
    if reference is not None and isinstance(policy, ScoresTogether):
        both = policy.logprobs_with(reference, batch, temperature)
        if both is not None:
            return both
    return policy.logprobs(batch, temperature), None
