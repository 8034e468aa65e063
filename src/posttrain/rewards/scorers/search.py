"""Question answering: the last <answer>…</answer> equals (em) or contains (subem) one of the targets."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from functools import partial
from typing import Literal

from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.extract import reference_text
from posttrain.rewards.options import check_choice
from posttrain.rewards.spans import spans

Match = Literal["em", "subem"]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


@REWARDS.register("search", quick=True)
def search(
    *, match: Match = "em", score: float = 1.0, format_score: float = 0.0, max_answer_tags: int | None = 10
) -> RewardFn:
    """A reward of ``score`` for a right answer, ``format_score`` for a wrong one, 0 for none; ``pred`` is the answer,
    normalised.

    Args: ``match`` em compares whole answers, subem finds a target inside; with more than ``max_answer_tags`` opening
        or closing answer tags a right answer gets a quarter (verl's rule for em; None disables it, as SkyRL).
    Raises: ConfigError for an unknown match.
    """
    check_choice("match", match, Match)
    limit = max_answer_tags if match == "em" else None
    return partial(_score, match=match, score=score, format_score=format_score, max_answer_tags=limit)


def _score(
    prompt: Prompt, response: str, *, match: Match, score: float, format_score: float, max_answer_tags: int | None
) -> dict[str, object]:
    """Raises: ValueError when the reference is not a text, a list of texts, or a mapping with such a target."""
    wanted = [normalize(target) for target in targets(prompt.ground_truth)]
    answers = spans(response, "<answer>", "</answer>")
    if not answers:
        return {"score": 0.0, "pred": ""}
    answer = normalize(answers[-1])
    if match == "em":
        right = answer in wanted
    else:
        right = any(target and target in answer for target in wanted)
    tags = max(response.count("<answer>"), response.count("</answer>"))
    if not right:
        score = format_score
    elif max_answer_tags is not None and tags > max_answer_tags:
        score /= 4
    return {"score": score, "pred": answer}


def targets(truth: object) -> list[str]:
    """Return the right answers: those of {"target": …}, a list, or a single one."""
    if isinstance(truth, Mapping) and "target" in truth:
        truth = truth["target"]
    if isinstance(truth, (list, tuple)) and truth:
        return [reference_text(target, "search") for target in truth]
    return [reference_text(truth, "search")]


def normalize(text: str) -> str:
    """Convert to lower case; remove punctuation (ASCII) and the words a, an and the; collapse blanks."""
    text = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(text.split())
