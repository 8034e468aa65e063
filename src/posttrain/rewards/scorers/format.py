"""Format check of a response, independent of its answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Literal

from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.options import check_choice
from posttrain.rewards.spans import last_boxed, spans, thinks_then_boxes

Form = Literal["think_answer", "think_boxed", "answer_tag", "boxed"]

_TAGS = re.compile(r"</?(?:think|answer)>")


@REWARDS.register("format", quick=True)
def format(*, form: Form = "think_answer", score: float = 1.0, otherwise: float = 0.0) -> RewardFn:
    r"""A reward of ``score`` for a response in the format, else ``otherwise``.

    Args: ``form`` think_answer is <think>…</think><answer>…</answer>, each tag once, with only blanks around and between;
        think_boxed begins with <think>, closes it, and has a \boxed{…} after it; answer_tag has an
        <answer>…</answer>; boxed has a \boxed{…} whose braces match as its last one.
    Raises: ConfigError for an unknown form.
    """
    check_choice("form", form, Form)
    return partial(_score, has_form=_FORMS[form], score=score, otherwise=otherwise)


def _score(prompt: Prompt, response: str, *, has_form: Callable[[str], bool], score: float, otherwise: float) -> float:
    return score if has_form(response) else otherwise


def _thinks_then_answers(response: str) -> bool:
    text = response.strip()
    between = "".join(text.partition("</think>")[2].partition("<answer>")[0].split())
    return (
        _TAGS.findall(text) == ["<think>", "</think>", "<answer>", "</answer>"]
        and text.startswith("<think>")
        and text.endswith("</answer>")
        and not between
    )


_FORMS: dict[Form, Callable[[str], bool]] = {
    "think_answer": _thinks_then_answers,
    "think_boxed": thinks_then_boxes,
    "answer_tag": lambda response: bool(spans(response, "<answer>", "</answer>")),
    "boxed": lambda response: last_boxed(response) is not None,
}
