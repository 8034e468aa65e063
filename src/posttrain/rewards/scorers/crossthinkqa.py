"""ROLL's CrossThinkQA: a reward from the correctness of the chosen letter and its box, by one of three tables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.choice import chosen_letter, wanted_letter
from posttrain.rewards.options import check_choice

RewardType = Literal["loose", "soft", "strict"]

# By (correct, boxed).
_TABLES: dict[RewardType, dict[tuple[bool, bool], float]] = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
}


@REWARDS.register("crossthinkqa", quick=True)
def crossthinkqa(*, reward_type: RewardType = "loose") -> RewardFn:
    """A reward from -1 to 1, with ``acc`` (1 when it is above 0) and ``pred`` (the letter). ROLL's penalties for repetition
    and length are separate terms: repetition and length.

    Raises: ConfigError for an unknown type.
    """
    check_choice("reward_type", reward_type, RewardType)
    return partial(_score, table=_TABLES[reward_type])


def _score(prompt: Prompt, response: str, *, table: Mapping[tuple[bool, bool], float]) -> dict[str, object]:
    """Raises: ValueError when the reference does not begin with a capital letter."""
    wanted = wanted_letter(prompt.ground_truth)
    letter, in_box = chosen_letter(response)
    score = table[letter == wanted, in_box]
    return {"score": score, "acc": float(score > 0), "pred": letter or ""}
