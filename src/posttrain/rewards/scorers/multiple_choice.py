"""Multiple choice: 1 when the chosen letter is the reference's."""

from __future__ import annotations

from functools import partial

from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.choice import chosen_letter, wanted_letter


@REWARDS.register("multiple_choice", quick=True)
def multiple_choice(*, boxed: bool = True) -> RewardFn:
    """A reward of 1 for the right letter, else 0; ``pred`` is the letter.

    Args: ``boxed`` True requires the letter in a box (ROLL's multiple_choice_boxed), False accepts it anywhere
        (ROLL's general_val).
    """
    return partial(_score, boxed=boxed)


def _score(prompt: Prompt, response: str, *, boxed: bool) -> dict[str, object]:
    """Raises: ValueError when the reference does not begin with a capital letter."""
    wanted = wanted_letter(prompt.ground_truth)
    letter, in_box = chosen_letter(response)
    counts = in_box or not boxed
    return {"score": float(letter == wanted and counts), "pred": (letter or "") if counts else ""}
