"""The divergence from teachers at sampled tokens, from log-probs of these tokens alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from posttrain.records.batches import TeacherScores
from posttrain.records.plans import DistillationPlan
from posttrain.registry import DIVERGENCES


def sampled_divergence(
    policy_logprobs: Tensor, teachers: Mapping[str, TeacherScores], mask: Tensor, plan: DistillationPlan
) -> Tensor:
    """The weighted sum over the teachers of each row, each clipped by itself.

    Args: policy_logprobs [B, T] nats, which may carry grad; teachers with their log-probs; mask [B, T] bool.
    Returns: [B, T] nats; 0 where mask is False, and on rows without a teacher.
    """
    measure = DIVERGENCES.get(plan.name, plan.path)
    total = torch.zeros_like(policy_logprobs)
    for name, weight in plan.teachers.items():
        answer = teachers[name]
        assert answer.logprobs is not None, "a divergence of sampled tokens reads their log-probs"
        mine = mask & answer.rows[:, None]
        found = measure(policy_logprobs, answer.logprobs, mine, **plan.parameters)
        if plan.clip is not None:
            found = found.clamp(-plan.clip, plan.clip)
        total = total + weight * torch.where(mine, found, 0.0)
    return total
