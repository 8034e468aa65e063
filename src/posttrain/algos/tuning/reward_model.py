"""Reward models: a score for a conversation, such that the better one of a pair has the higher score."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algos.shapes import check_same_shape
from posttrain.registry import TUNE_METHODS
from posttrain.settings import Weight


@TUNE_METHODS.register("reward_model")
def reward_model(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margins: Tensor,
    *,
    center_coef: Weight = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigma(chosen - rejected - margin), plus center_coef (chosen + rejected)^2; one number per pair.

    The probability that the chosen side wins is sigma(difference of scores) (Bradley and Terry). Only differences are learned;
    center_coef keeps their mean near 0. Equal scores have loss ln 2 without a margin.

    Args: scores [P], carrying grad; margins [P], by how much the chosen side is better, 0 where the data does not say.
    Settings:
        center_coef: weight of the square of the sum of the two scores.
    Returns: loss [P]; and what to log, each [P]: rewards/chosen, rewards/rejected.
    Source: arXiv:2203.02155, equation 1; margin: arXiv:2307.09288, equation 2; center_coef: arXiv:2312.09244.
    """
    check_same_shape(chosen=chosen_scores, rejected=rejected_scores, margins=margins)
    losses = -logsigmoid(chosen_scores - rejected_scores - margins)
    if center_coef:
        losses = losses + center_coef * (chosen_scores + rejected_scores) ** 2
    return losses, {"rewards/chosen": chosen_scores, "rewards/rejected": rejected_scores}
