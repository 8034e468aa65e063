"""A penalty for responses that are too short or too long, in characters."""

from __future__ import annotations

from functools import partial

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS


@REWARDS.register("length", quick=True)
def length(
    *, min_characters: int = 0, max_characters: int | None = None, ramp_characters: int = 1000, penalty: float = 1.0
) -> RewardFn:
    """A reward of 0 between the two lengths, falling linearly to ``-penalty`` at ``ramp_characters`` beyond them. For a
    penalty in tokens near max_response_tokens, use reward.overlong_buffer_tokens.

    Raises: ConfigError when no length lies between the two, or the ramp is shorter than 1.
    """
    problems = []
    if min_characters < 0 or (max_characters is not None and max_characters < min_characters):
        what = f"no length lies between min_characters {min_characters} and max_characters {max_characters}"
        problems.append(Problem(what, fix="use 0 <= min <= max", field="options.max_characters"))
    if ramp_characters < 1:
        what = f"ramp_characters is {ramp_characters}"
        problems.append(Problem(what, fix="use at least 1", field="options.ramp_characters"))
    if problems:
        raise ConfigError(problems)
    return partial(_score, shortest=min_characters, longest=max_characters, ramp=ramp_characters, penalty=penalty)


def _score(prompt: Prompt, response: str, *, shortest: int, longest: int | None, ramp: int, penalty: float) -> float:
    too_short = shortest - len(response)
    too_long = 0 if longest is None else len(response) - longest
    return -penalty * min(max(too_short, too_long, 0) / ramp, 1.0)
