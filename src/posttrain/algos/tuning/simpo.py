"""Simple preference optimisation: the mean log-prob of a completion is its reward, without a reference."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algos.shapes import check_same_shape
from posttrain.registry import TUNE_METHODS
from posttrain.settings import BelowHalf, Strength, Weight


@TUNE_METHODS.register("simpo")
def simpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    *,
    loss: Literal["sigmoid", "hinge"] = "sigmoid",
    beta: Strength = 2.0,
    gamma: Weight = 1.0,
    label_smoothing: BelowHalf = 0.0,
    nll_coef: Weight = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigma(d), with d = beta m(chosen) - beta m(rejected) - gamma; one number per pair.

    m is the mean log-prob of a completion's tokens. hinge: max(0, 1 - d). Two sides of equal likelihood have loss
    log(1 + e^gamma).

    Args: log-probs of whole completions, sums over tokens, [P] nats, carrying grad; tokens [P], their number of tokens.
    Settings:
        loss: shape of the loss.
        beta: scale of the rewards.
        gamma: margin that the chosen side's reward is to have.
        label_smoothing: share of pairs whose labels are taken to be wrong (sigmoid); from one half on, the loss
            would prefer the rejected side.
        nll_coef: weight of the negative log-likelihood of the chosen side, per token (TRL's cpo_alpha).
    Returns: loss [P]; and what to log, each [P]: rewards/chosen, rewards/rejected.
    Source: arXiv:2405.14734, equation 6.
    """
    check_same_shape(chosen=chosen_logps, rejected=rejected_logps, tokens=chosen_tokens)
    chosen, rejected = chosen_logps / chosen_tokens.clamp(min=1), rejected_logps / rejected_tokens.clamp(min=1)
    d = beta * (chosen - rejected) - gamma
    if loss == "hinge":
        losses = torch.relu(1 - d)
    else:
        losses = -(1 - label_smoothing) * logsigmoid(d) - label_smoothing * logsigmoid(-d)
    if nll_coef:
        losses = losses - nll_coef * chosen
    return losses, {"rewards/chosen": beta * chosen, "rewards/rejected": beta * rejected}
