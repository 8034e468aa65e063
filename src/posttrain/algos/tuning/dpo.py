"""Direct preference optimisation: a reward model that is the policy itself, measured against its reference."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algos.shapes import check_same_shape
from posttrain.registry import TUNE_METHODS
from posttrain.settings import BelowHalf, Strength, Weight


@TUNE_METHODS.register("dpo")
def dpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    *,
    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid",
    beta: Strength = 0.1,
    label_smoothing: BelowHalf = 0.0,
    per_token: bool = False,
    nll_coef: Weight = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of h = log [pi(chosen) / ref(chosen)] - log [pi(rejected) / ref(rejected)], one number per pair.

    sigmoid: -(1 - e) log sigma(beta h) - e log sigma(-beta h), with e = label_smoothing (e > 0 is conservative DPO).
    robust: the same with -e in the second term, divided by 1 - 2 e: unbiased where a share e of the labels is wrong.
    hinge: max(0, 1 - beta h). ipo: (h - 1 / (2 beta))^2. nll_coef adds that multiple of the mean -log pi over the tokens of the
    chosen side. At pi = ref, h is 0: sigmoid is ln 2, hinge 1 and ipo 1 / (2 beta)^2.

    Args: log-probs of whole completions, sums over tokens, [P] nats (those of the policy carry grad); tokens [P], their
        number of tokens.
    Settings:
        loss: shape of the loss.
        beta: strength of the pull to the reference; the rewards are beta log [pi / ref].
        label_smoothing: share of pairs whose labels are taken to be wrong (sigmoid, robust); from one half on, the loss
            would prefer the rejected side.
        per_token: divide every log-prob by the number of its tokens, as TRL does for ipo; ROLL does not.
        nll_coef: weight of the negative log-likelihood of the chosen side, per token (RPO).
    Returns: loss [P]; and what to log, each [P]: rewards/chosen, rewards/rejected.
    Source: arXiv:2305.18290, equation 7; hinge: arXiv:2305.10425; ipo: arXiv:2310.12036, equation 17; robust: arXiv:2403.00409;
        nll_coef: arXiv:2404.19733.
    """
    check_same_shape(chosen=chosen_logps, rejected=rejected_logps, ref=ref_chosen_logps, tokens=chosen_tokens)
    chosen, rejected = chosen_logps - ref_chosen_logps, rejected_logps - ref_rejected_logps
    report = {"rewards/chosen": beta * chosen, "rewards/rejected": beta * rejected}
    if per_token:
        chosen, rejected = chosen / chosen_tokens.clamp(min=1), rejected / rejected_tokens.clamp(min=1)
    h = chosen - rejected
    if loss == "hinge":
        losses = torch.relu(1 - beta * h)
    elif loss == "ipo":
        losses = (h - 1 / (2 * beta)) ** 2
    elif loss == "robust":
        right, wrong = logsigmoid(beta * h), logsigmoid(-beta * h)
        losses = -((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    else:
        losses = -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)
    if nll_coef:
        losses = losses - nll_coef * chosen_logps / chosen_tokens.clamp(min=1)
    return losses, report
