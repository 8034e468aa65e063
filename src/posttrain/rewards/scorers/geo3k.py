r"""Geometry3K: 0.9 for the right \boxed{…}, 0.1 for <think>…</think>…\boxed{…}."""

from __future__ import annotations

from functools import partial

from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.equivalence import same_by_form
from posttrain.rewards.extract import reference_text
from posttrain.rewards.spans import last_boxed, thinks_then_boxes


@REWARDS.register("geo3k", quick=True)
def geo3k(*, format_share: float = 0.1) -> RewardFn:
    """A reward of ``1 - format_share`` for the right answer plus ``format_share`` for the format, independently; also ``acc``,
    ``format`` and ``pred``, the answer as text."""
    return partial(_score, format_share=format_share)


def _score(prompt: Prompt, response: str, *, format_share: float) -> dict[str, object]:
    """Raises: ValueError when the reference is neither a text nor a number."""
    reference = reference_text(prompt.ground_truth, "geo3k")
    box = last_boxed(response)
    right = float(box is not None and same_by_form(box, reference))
    formed = float(thinks_then_boxes(response))
    score = (1.0 - format_share) * right + format_share * formed
    return {"score": score, "acc": right, "format": formed, "pred": box or ""}
