"""A penalty for repetition: the share of duplicate n-grams."""

from __future__ import annotations

from functools import partial

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS


@REWARDS.register("repetition", quick=True)
def repetition(*, words: int = 3, penalty: float = 0.5) -> RewardFn:
    """A reward of ``-penalty`` times (1 - different / all) n-grams of ``words`` words each; 0 when the response has fewer
    words. Words are separated by blanks and compared in lower case.

    Raises: ConfigError when ``words`` is below 1.
    """
    if words < 1:
        raise ConfigError(Problem(f"words is {words}", fix="use at least 1", field="options.words"))
    return partial(_score, words=words, penalty=penalty)


def _score(prompt: Prompt, response: str, *, words: int, penalty: float) -> float:
    said = response.lower().split()
    total = len(said) - words + 1
    if total < 1:
        return 0.0
    different = len({tuple(said[start : start + words]) for start in range(total)})
    return -penalty * (1.0 - different / total)
