"""ROLL's math rule: the answer after the thinking equals the reference by computer algebra."""

from __future__ import annotations

from functools import partial
from typing import Literal

from posttrain.interfaces.reward import RewardFn
from posttrain.libraries import math_verify as library
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.algebra import same_by_algebra
from posttrain.rewards.extract import reference_text
from posttrain.rewards.options import check_choice

Part = Literal["after_thinking", "whole"]


@REWARDS.register("math_rule")
def math_rule(*, part: Part = "after_thinking") -> RewardFn:
    """A reward of 1 for the right answer, else 0.

    Args: ``part`` after_thinking reads only the text after </think> or, without one, after the last blank line (a response
        with neither scores 0); whole reads all of it.
    Raises: ConfigError for an unknown part; MissingDependency without math-verify.
    """
    check_choice("part", part, Part)
    library.check_installed("reward math_rule")
    return partial(_score, part=part)


def _score(prompt: Prompt, response: str, *, part: Part) -> float:
    """Raises: ValueError when math-verify cannot parse the reference."""
    reference = reference_text(prompt.ground_truth, "math_rule")
    text = response.replace("<|endoftext|>", "").replace("<pad>", "")
    if part == "after_thinking":
        text = after_thinking(text, prompt_opens_it=prompt.text.rstrip("\n").endswith("<think>"))
    return float(bool(text) and same_by_algebra(text, reference, skip_quoted=True))


def after_thinking(response: str, *, prompt_opens_it: bool) -> str:
    """Return the part that holds the answer; empty when the tags are wrong or nothing marks the part.

    Wrong tags: two closing tags; an opening tag anywhere but at the start, or where the prompt has already opened it.
    """
    misplaced = "<think>" in (response if prompt_opens_it else response.removeprefix("<think>"))
    if misplaced or response.count("</think>") > 1:
        return ""
    for mark in ("</think>", "\n\n"):
        if mark in response:
            return response.rpartition(mark)[2]
    return ""
