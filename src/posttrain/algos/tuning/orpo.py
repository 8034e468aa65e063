"""Odds ratio preference optimisation: imitation of the chosen side and a preference in one loss, without a reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algos.shapes import check_same_shape
from posttrain.registry import TUNE_METHODS
from posttrain.settings import Weight


@TUNE_METHODS.register("orpo")
def orpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    *,
    beta: Weight = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-m(chosen) - beta log sigma(log odds(chosen) - log odds(rejected)), one number per pair.

    m is the mean log-prob of a completion's tokens, odds = e^m / (1 - e^m). The first term is the negative log-likelihood of the
    chosen side. TRL takes that over the prompt's tokens as well; here, as in the paper's equation, the prompt is given.

    Args: log-probs of whole completions, sums over tokens, [P] nats, carrying grad; tokens [P], their number of tokens.
    Settings:
        beta: weight of the odds ratio (lambda in the paper).
    Returns: loss [P]; and what to log, each [P]: rewards/chosen, rewards/rejected, nll_loss, log_odds_chosen, log_odds_ratio.
    Source: arXiv:2403.07691, equations 6 and 7.
    """
    check_same_shape(chosen=chosen_logps, rejected=rejected_logps, tokens=chosen_tokens)
    chosen, rejected = chosen_logps / chosen_tokens.clamp(min=1), rejected_logps / rejected_tokens.clamp(min=1)
    log_odds = (chosen - _log_of_rest(chosen)) - (rejected - _log_of_rest(rejected))
    ratio = logsigmoid(log_odds)
    return -chosen - beta * ratio, {
        "rewards/chosen": beta * chosen,
        "rewards/rejected": beta * rejected,
        "nll_loss": -chosen,
        "log_odds_chosen": log_odds,
        "log_odds_ratio": ratio,
    }


def _log_of_rest(mean_logps: Tensor) -> Tensor:
    """log(1 - e^m). A completion that is certain (m = 0) has infinite odds; m is kept a little below 0."""
    return torch.log(-torch.expm1(mean_logps.clamp(max=-1e-7)))
