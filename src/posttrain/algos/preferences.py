"""The loss of a tuning method over rows: sums of log-probs, or scores, of completions as the method's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.records.batches import LossCounts, TrainBatch
from posttrain.records.plans import PreferencePlan
from posttrain.registry import TUNE_METHODS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreferenceValues:
    """Losses of U units (pairs, or single rows), and what to log of them."""

    losses: Tensor  # [U] float64; 0 where not valid
    valid: Tensor  # [U] bool: every row of the unit has a loss token
    report: Mapping[str, Tensor]  # name -> [U] float64, detached; NaN where it is not meant

    def means(self) -> dict[str, float]:
        """Return the mean of every logged value over the valid units in which it is meant; a name without any is left out."""
        found = {}
        for name, values in {"loss": self.losses.detach(), **self.report}.items():
            meant = values[self.valid & ~values.isnan()]
            if len(meant):
                found[name] = float(meant.mean())
        return found


def preference_values(values: Tensor, batch: TrainBatch, plan: PreferencePlan) -> PreferenceValues:
    """Compute the losses of the rows, which come pair after pair, the chosen side first, or one by one.

    Args: values [B, T], log-probs in nats, or of a model with a score head its score where loss_mask is True (one token of
        each row); may carry grad.
    """
    targets, mask = batch.preference, batch.loss_mask
    assert targets is not None, "rows of a preference dataset carry their targets"
    totals = torch.where(mask, values.double(), 0.0).sum(dim=1)
    tokens = mask.sum(dim=1).double()
    has_tokens = mask.any(dim=1)
    if plan.paired:
        chosen, rejected = slice(0, None, 2), slice(1, None, 2)
        available = {
            "chosen_logps": totals[chosen],
            "rejected_logps": totals[rejected],
            "chosen_scores": totals[chosen],
            "rejected_scores": totals[rejected],
            "chosen_tokens": tokens[chosen],
            "rejected_tokens": tokens[rejected],
            "ref_chosen_logps": targets.ref_logps[chosen].double(),
            "ref_rejected_logps": targets.ref_logps[rejected].double(),
            "margins": targets.margins[chosen].double(),
        }
        valid = has_tokens[chosen] & has_tokens[rejected]
    else:
        available = {
            "logps": totals,
            "tokens": tokens,
            "ref_logps": targets.ref_logps.double(),
            "desirable": targets.desirable,
            "kl": totals.new_tensor(plan.kl),
        }
        valid = has_tokens
    method = TUNE_METHODS.get(plan.name, plan.path)
    inputs = [available[name] for name in TUNE_METHODS.describe(plan.name, plan.path).inputs]
    losses, report = method(*inputs, **plan.parameters)
    logged = {name: each.detach() for name, each in report.items()}
    if plan.paired:
        better, worse = logged["rewards/chosen"], logged["rewards/rejected"]
        logged |= {"rewards/accuracies": (better > worse).double(), "rewards/margins": better - worse}
        if "chosen_logps" in TUNE_METHODS.describe(plan.name, plan.path).inputs:
            logged |= {"logps/chosen": totals[chosen].detach(), "logps/rejected": totals[rejected].detach()}
    return PreferenceValues(losses=torch.where(valid, losses, 0.0), valid=valid, report=logged)


def preference_loss(values: Tensor, batch: TrainBatch, plan: PreferencePlan, counts: LossCounts) -> Tensor:
    """This part's share of the mini-batch's loss: the sum of its units' losses over the number of all units."""
    units = counts.sequences // plan.rows_per_unit
    return preference_values(values, batch, plan).losses.sum() / max(units, 1)
