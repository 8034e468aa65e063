"""Exact match: 1 when the extracted answer equals the reference answer, else 0."""

from __future__ import annotations

from functools import partial

from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.extract import Extract, check_extract, extract_answer, number, reference_text, same_answer


@REWARDS.register("exact_match", quick=True)
def exact_match(*, extract: Extract = "last_number") -> RewardFn:
    """A reward that compares the answer with ``ground_truth``, as text or as numbers (see ``posttrain.rewards.extract``);
    ``pred`` is the answer, as text.

    Raises: ConfigError for an unknown ``extract``.
    """
    check_extract(extract)
    return partial(_score, extract=extract)


def _score(prompt: Prompt, response: str, *, extract: Extract) -> dict[str, object]:
    """Raises: ValueError when no response could match the reference answer."""
    reference = reference_text(prompt.ground_truth, "exact_match")
    if extract == "last_number" and number(reference) is None:
        raise ValueError(f"the ground truth {reference!r} is not a number, so extract: last_number can never match it")
    answer = extract_answer(response, extract)
    return {"score": float(answer is not None and same_answer(answer, reference)), "pred": answer or ""}
