"""A reward by chance, for trials of memory and speed on made-up rows."""

from __future__ import annotations

from functools import partial
from zlib import crc32

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS


@REWARDS.register("chance", quick=True)
def chance(*, share: float = 0.5) -> RewardFn:
    """A reward of 1 for about ``share`` of all responses, and 0 for the others; the same response always gets the same.

    Raises: ConfigError when share is no number from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ConfigError(Problem(f"share is {share}", fix="use a number from 0 to 1", field="options.share"))
    return partial(_score, share=share)


def _score(prompt: Prompt, response: str, *, share: float) -> float:
    return float(crc32(response.encode("utf-8", "surrogatepass")) < share * 2**32)
