"""Rules about micro-batches: what a budget of tokens must hold, and which of two ways of cutting counts."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.model import ReferenceConfig
from posttrain.config.policy import PolicyConfig
from posttrain.config.roles import (
    chooses_before,
    needs_ref_logprobs,
    needs_values,
    replaces_old_logprobs,
    scores_tokens_before,
    several_updates,
)
from posttrain.errors import Problem


def batch_problems(config: RunConfig) -> Iterator[Problem]:
    """Budgets that one sequence may not fit into, and losses that a micro-batch would show too few sequences."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    for role, section in _cut_roles(config):
        budget = section.max_tokens_per_micro_batch
        # Devices that pool their budgets
        shared = (config.critic if role == "critic" else config.policy).sequence_parallel
        if budget is not None and prompt + response > budget * shared:
            field = f"{role}.max_tokens_per_micro_batch"
            yield Problem(
                f"a prompt and its response may have {prompt} + {response} = {prompt + response} tokens, and {field} is "
                f"{budget}" + (f", on {shared} devices that share a sequence" if shared > 1 else ""),
                fix=f"use {field}={-(-(prompt + response) // shared)} or more, or lower data.max_prompt_tokens or "
                "rollout.max_response_tokens",
                field=field,
            )


def batch_warnings(config: RunConfig) -> Iterator[str]:
    """Sizes of micro-batches that were given and have no effect."""
    cut = _cut_roles(config)
    for role, section in cut:
        default = type(section).model_fields["sequences_per_micro_batch_per_device"].default
        if section.max_tokens_per_micro_batch is not None and section.sequences_per_micro_batch_per_device != default:
            yield (
                f"{role}.sequences_per_micro_batch_per_device has no effect: {role}.max_tokens_per_micro_batch is given, and "
                "micro-batches are cut by tokens"
            )
    if config.reference.max_tokens_per_micro_batch is not None and "reference" not in dict(cut):
        yield (
            "reference.max_tokens_per_micro_batch has no effect: this run computes no log-probs without gradient (one update "
            "per step, no log-probs of a reference)"
        )


def _cut_roles(config: RunConfig) -> list[tuple[str, PolicyConfig | ReferenceConfig | CriticConfig]]:
    """The sections whose micro-batches a run cuts. That of the reference also serves the policy's old log-probs."""
    scores_reference = needs_ref_logprobs(config)
    roles: list[tuple[str, PolicyConfig | ReferenceConfig | CriticConfig]] = [("policy", config.policy)]
    scores_policy = (
        scores_tokens_before(config)
        or chooses_before(config)
        or (several_updates(config) and not replaces_old_logprobs(config))
    )
    if scores_policy or scores_reference:
        roles.append(("reference", config.reference))
    if needs_values(config):
        roles.append(("critic", config.critic))
    return roles
