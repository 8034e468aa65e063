"""Group reward-decoupled normalisation: each term of the reward is standardised in its group before they are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from posttrain.algos.advantages.grpo import standardized
from posttrain.algos.groups import compare_in_groups
from posttrain.algos.statistics import whiten
from posttrain.errors import Problem, RequestError
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("gdpo", compares_responses=True)
def gdpo(
    reward_terms: Mapping[str, Tensor],
    valid: Tensor,
    group_index: Tensor,
    response_mask: Tensor,
    *,
    terms: Sequence[str] = (),
    term_weights: Sequence[float] = (),
    lone_sample_keeps_reward: bool = False,
) -> Tensor:
    """GRPO's advantage of every reward term, weighted and summed, then whitened over all tokens of the batch.

    So a term with a small spread counts as much as one with a large spread. A response that has no such term (it belongs to
    prompts of other data) has no part in that term's comparison.

    Args: reward_terms, name -> [B], NaN where a response has no such term; valid [B] bool (invalid responses leave all
        statistics and get 0); group_index [B] int64; response_mask [B, T] bool.
    Settings:
        terms: names of the reward terms that are compared; empty means all, except for the numbers that a reward gives besides
            its score (named term/key).
        term_weights: weight of each of these terms; empty means 1 each.
        lone_sample_keeps_reward: a response that is alone in its group gets its reward; false gives 0.
    Returns: [B, T] float32, in standard deviations over the batch, 0 where response_mask is False.
    Raises: RequestError when a number beside a score has not been given, or there is another number of weights.
    Source: arXiv:2601.05242.
    """

    def compare(scores: Tensor, rows: Tensor) -> Tensor:
        return standardized(scores)

    chosen = list(terms) or [name for name in reward_terms if "/" not in name]
    weights = list(term_weights) or [1.0] * len(chosen)
    known = ", ".join(reward_terms) or "none"
    # A step in which no response has a term has nothing to compare in it. Numbers beside a score are looked up nowhere else.
    missing = [name for name in chosen if name not in reward_terms and "/" in name]
    if missing:
        what = f"no response of this step has a reward term {missing[0]} (its terms: {known})"
        raise RequestError(Problem(what, fix="name one of these", field="advantage.terms"))
    if len(weights) != len(chosen):
        what = f"advantage.term_weights has {len(weights)} numbers for {len(chosen)} terms ({', '.join(chosen)})"
        raise RequestError(Problem(what, fix="give one for each term", field="advantage.term_weights"))
    total = torch.zeros_like(group_index, dtype=torch.float64)
    for name, weight in zip(chosen, weights, strict=True):
        if name not in reward_terms:
            continue
        scores = reward_terms[name]
        total += weight * compare_in_groups(
            scores, valid & scores.isfinite(), group_index, compare, lone_sample_keeps_reward=lone_sample_keeps_reward
        )
    mask = response_mask & valid[:, None]
    return whiten(total[:, None].expand(mask.shape), mask).float()
