r"""The last \boxed{…}, equal to the reference once both are normalised as in the MATH benchmark."""

from __future__ import annotations

from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.extract import reference_text
from posttrain.rewards.latex_text import same_latex
from posttrain.rewards.spans import braced


@REWARDS.register("math", quick=True)
def math() -> RewardFn:
    """A reward of 1 for the right answer, else 0; ``pred`` is the answer, as text."""
    return _score


def _score(prompt: Prompt, response: str) -> dict[str, object]:
    """Raises: ValueError when the reference is neither a text nor a number."""
    reference = reference_text(prompt.ground_truth, "math")
    answer = boxed_answer(response)
    right = answer is not None and same_latex(answer, reference)
    return {"score": float(right), "pred": answer or ""}


def boxed_answer(response: str) -> str | None:
    r"""Return the content of the last box. Where "\boxed 5$" occurs anywhere, that is the text after the last one up to a
    dollar sign; else the content of the last \boxed{…}, braces matched. None without a box, or when none is closed."""
    if "\\boxed " in response:
        return response.rpartition("\\boxed ")[2].partition("$")[0]
    start = response.rfind("\\boxed")
    if start < 0 or not response.startswith("\\boxed{", start):
        return None
    found = braced(response, start)
    return found[0] if found else None
