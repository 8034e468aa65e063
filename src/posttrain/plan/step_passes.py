"""The passes that a step makes over its models: which roles compute what, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.config import RunConfig
from posttrain.config.distillation import ROLE
from posttrain.config.roles import needs_old_logprobs, replaces_old_logprobs
from posttrain.plan.placement import PlacementPlan, RolePlacement
from posttrain.records.batch_plans import BatchPlan, CriticBatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPass:
    """One role's work on all sequences of a step."""

    what: str  # names it in tables
    place: RolePlacement
    updates: BatchPlan | CriticBatchPlan | None = None  # None: without gradient


def step_passes(config: RunConfig, batches: BatchPlan, plan: PlacementPlan) -> Iterator[StepPass]:
    """Yield what trains and scores in a step; sampling, and a judge's, is not among them."""
    policy, reference, critic = plan.role("policy"), plan.role("reference"), plan.role("critic")
    assert policy is not None, "every run has a policy"
    yield StepPass(what="policy", place=policy, updates=batches)
    if (not batches.on_policy and not replaces_old_logprobs(config)) or needs_old_logprobs(config):
        yield StepPass(what="old log-probs", place=policy)
    if config.loss.high_entropy_share is not None:
        yield StepPass(what="entropies", place=policy)
    if reference is not None:
        yield StepPass(what="reference log-probs", place=reference)
    if critic is not None and batches.critic is not None:
        yield StepPass(what="critic", place=critic, updates=batches.critic)
        yield StepPass(what="values", place=critic)
    for role in plan.roles:
        if role.role == "reward model" or role.role.startswith(ROLE):
            yield StepPass(what=role.role, place=role)
