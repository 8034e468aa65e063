"""What the policy's most likely answer to each prompt is worth: the baseline of ReMax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.rollout_engine import OnTokens
from posttrain.records.batches import SequenceBatch
from posttrain.records.plans import RewardPlan
from posttrain.records.trajectories import Reward, SamplingParams, ScoredGroup
from posttrain.steps.collect import collect
from posttrain.steps.score import score
from posttrain.steps.shape_rewards import shape_outcomes


def add_greedy_rewards(
    batch: SequenceBatch,
    roles: Roles,
    scorer: GroupScorer,
    groups: Sequence[ScoredGroup],
    sampling: SamplingParams,
    plan: RewardPlan,
    on_tokens: OnTokens | None = None,
) -> SequenceBatch:
    """The batch of these groups with the reward of one greedy response to each of their prompts, scored and clipped like the
    sampled ones; NaN where it has no valid reward.

    Source: arXiv:2310.10505, algorithm 1.
    """
    prompts = {group.group.prompt.prompt_id: group.group.prompt for group in groups}
    greedy = replace(sampling, samples_per_prompt=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    sampled = collect(roles, list(prompts.values()), greedy, on_tokens, scorer.begin)
    scored = score(sampled, scorer, reward_model=roles.reward_model, model_weight=plan.model_weight)
    rewards = {
        prompt_id: outcome.value if isinstance(outcome, Reward) else float("nan")
        for prompt_id, group in zip(prompts, shape_outcomes(scored, plan), strict=True)
        for outcome in group.outcomes
    }
    by_group = torch.tensor([rewards[group.group.prompt.prompt_id] for group in groups])
    if plan.clip is not None:
        by_group = by_group.clamp(-plan.clip, plan.clip)
    return replace(batch, greedy_rewards=by_group[batch.group_index])
