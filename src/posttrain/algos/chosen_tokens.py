"""The tokens of a mini-batch that its loss treats otherwise, chosen over all of it before the update."""

from __future__ import annotations

import inspect
from importlib import import_module

from torch import Tensor

from posttrain.algos.old_policy import old_logprobs
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan
from posttrain.registry import POLICY_LOSSES


def chosen_tokens(policy_logprobs: Tensor, batch: TrainBatch, plan: LossPlan) -> Tensor:
    """The tokens [B, T] bool of a whole mini-batch that its loss, registered with ``chooses_tokens``, treats otherwise.

    Args: policy_logprobs [B, T] nats of the policy as it is before the update.
    """
    choose = import_module(POLICY_LOSSES.get(plan.name).__module__).choose
    wanted = inspect.signature(choose).parameters
    settings = {name: each.default for name, each in POLICY_LOSSES.settings(plan.name).items()} | dict(plan.parameters)
    settings = {name: value for name, value in settings.items() if name in wanted}
    old = old_logprobs(policy_logprobs, batch, plan)
    chosen: Tensor = choose(policy_logprobs, old, batch.advantages, batch.loss_mask, **settings)
    return chosen
