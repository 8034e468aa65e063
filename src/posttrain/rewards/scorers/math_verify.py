"""math-verify: the answer equals the reference by computer algebra."""

from __future__ import annotations

from posttrain.interfaces.reward import RewardFn
from posttrain.libraries import math_verify as library
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.algebra import same_by_algebra
from posttrain.rewards.extract import reference_text


@REWARDS.register("math_verify")
def math_verify() -> RewardFn:
    """A reward of 1 for the right answer, else 0.

    Raises: MissingDependency without math-verify.
    """
    library.check_installed("reward math_verify")
    return _score


def _score(prompt: Prompt, response: str) -> float:
    """Raises: ValueError when math-verify cannot parse the reference."""
    return float(same_by_algebra(response, reference_text(prompt.ground_truth, "math_verify")))
