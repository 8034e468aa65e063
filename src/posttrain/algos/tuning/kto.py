"""Kahneman-Tversky optimisation: completions that are good or bad, without pairs."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algos.shapes import check_same_shape
from posttrain.registry import TUNE_METHODS
from posttrain.settings import Strength, Weight


@TUNE_METHODS.register("kto")
def kto(
    logps: Tensor,
    ref_logps: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: Strength = 0.1,
    desirable_weight: Weight = 1.0,
    undesirable_weight: Weight = 1.0,
    reference_point: Literal["kl", "zero"] = "kl",
) -> tuple[Tensor, dict[str, Tensor]]:
    """w_d (1 - sigma(r - z)) of a desirable completion, w_u (1 - sigma(z - r)) of an undesirable one.

    r = beta log [pi / ref] of the completion; z = beta max(0, KL), where KL is estimated on completions of other prompts in the
    step and carries no gradient. At pi = ref both are one half of their weight.

    Args: log-probs of whole completions, sums over tokens, [R] nats (those of the policy carry grad); desirable [R] bool;
        kl, scalar in nats, not below 0.
    Settings:
        beta: strength of the pull to the reference.
        desirable_weight: weight of desirable completions. The paper keeps the ratio of the two weights' sums over the data
            between 1 and 4/3.
        undesirable_weight: weight of undesirable completions.
        reference_point: kl, or zero, which leaves z out (TRL's apo_zero_unpaired).
    Returns: loss [R]; and what to log, each [R], NaN where it is not meant: rewards/chosen, rewards/rejected, logps/chosen,
        logps/rejected.
    Source: arXiv:2402.01306, equation 8; zero: arXiv:2408.06266.
    """
    check_same_shape(logps=logps, ref_logps=ref_logps, desirable=desirable)
    rewards = beta * (logps - ref_logps)
    point = beta * kl if reference_point == "kl" else torch.zeros_like(kl)
    gain = torch.where(desirable, rewards - point, point - rewards)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    report = {}
    for name, values in (("rewards", rewards.detach()), ("logps", logps.detach())):
        report[f"{name}/chosen"] = torch.where(desirable, values, torch.nan)
        report[f"{name}/rejected"] = torch.where(desirable, torch.nan, values)
    return weights * (1 - torch.sigmoid(gain)), report
