"""ROLL's math rule: the answer after the thinking is the reference by computer algebra."""

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

    Args: ``part`` after_thinking looks only at what follows </think> or, without one, the last blank line (a response
        with neither scores 0); whole looks at all of it.
    Raises: ConfigError for another part; MissingDependency without math-verify.
    """
    check_choice("part", part, Part)
    library.check_installed("reward math_rule")
    return partial(_score, part=part)


def _score(prompt: Prompt, response: str, *, part: Part) -> float:
    """Raises ValueError when the reference is nothing that math-verify understands."""
    reference = reference_text(prompt.ground_truth, "math_rule")
    text = response.replace("<|endoftext|>", "").replace("<pad>", "")
    if part == "after_thinking":
        text = after_thinking(text, prompt_opens_it=prompt.text.rstrip("\n").endswith("<think>"))
    return float(bool(text) and same_by_algebra(text, reference, skip_quoted=True))


def after_thinking(response: str, *, prompt_opens_it: bool) -> str:
    """The part that holds the answer; empty when the tags are wrong or nothing marks the part.

    Wrong are: two closing tags; an opening tag where the prompt has opened it already, or anywhere but at the start.
    """
    misplaced = "<think>" in (response if prompt_opens_it else response.removeprefix("<think>"))
    if misplaced or response.count("</think>") > 1:
        return ""
    for mark in ("</think>", "\n\n"):
        if mark in response:
            return response.rpartition(mark)[2]
    return ""
