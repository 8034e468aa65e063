"""The two rewards that stand on math-verify, and what of a text reaches an evaluator on the way."""

from __future__ import annotations

import builtins
import re
from typing import Any

import pytest

from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS

pytest.importorskip("math_verify")
sympy_parser = pytest.importorskip("sympy.parsing.sympy_parser")


def prompt(truth: str, text: str = "?") -> Prompt:
    return Prompt(prompt_id="a:0", token_ids=(1,), text=text, data_source="t", ground_truth=truth, extra_info={})


@pytest.mark.parametrize(
    ("truth", "response", "right"),
    [
        ("0.5", "\\boxed{\\frac{1}{2}}", 1),
        ("\\frac{1}{2}", "so $x = \\frac{2}{4}$", 1),
        ("$\\frac{1}{2}$", "it is 1/2.", 1),
        ("1000", "it costs 1,000 in all", 1),
        ("5", "\\boxed{5} and \\boxed{6}", 0),
        ("(x+1)^2", "\\boxed{x^2+2x+1}", 1),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1),
        ("(1,2)", "\\boxed{(2,1)}", 0),
        ("5", "\\boxed{}", 0),
        ("5", "\\boxed{\\frac", 0),
        ("5", "no number", 0),
        ("5", "", 0),
        ("5", "$" * 5000, 0),
        ("5", "\\boxed{" + "(" * 5000 + "}", 0),
        ("5", "\\boxed{\uff15}", 0),
        ("-5", "\u2212 5, that is $-5$", 1),
    ],
)
def test_math_verify(truth: str, response: str, right: float) -> None:
    assert REWARDS.get("math_verify")()(prompt(truth), response) == right


@pytest.mark.parametrize(
    ("prompt_text", "response", "right"),
    [
        ("?", "<think>6</think>\\boxed{5}", 1),
        ("?", "thinking</think>\\boxed{5}", 1),
        ("?", "so <think>6</think>\\boxed{5}", 0),  # an opening tag that is not at the start
        ("?", "<think></think></think>\\boxed{5}", 0),
        ("?", "thinking\n\nthe answer is 5", 1),
        ("?", "\\boxed{5}\n\nthe end", 0),
        ("?", "\\boxed{5}", 0),  # neither a tag nor a blank line
        ("<think>\n", "6</think>\\boxed{5}", 1),
        ("<think>\n", "<think>6</think>\\boxed{5}", 0),
        ("?", "<think>6</think>\\boxed{5}<|endoftext|><pad>", 1),
    ],
)
def test_math_rule(prompt_text: str, response: str, right: float) -> None:
    assert REWARDS.get("math_rule")()(prompt("5", prompt_text), response) == right


def test_math_rule_may_look_at_the_whole_response() -> None:
    assert REWARDS.get("math_rule")(part="whole")(prompt("5"), "\\boxed{5}") == 1


def test_a_reference_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="does not understand the ground truth"):
        REWARDS.get("math_verify")()(prompt("\\frac{"), "5")


def test_nothing_but_digits_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """sympy makes numbers of digits with its parser, which is Python's eval; no other part of a text may get there."""
    evaluate, evaluated = builtins.eval, []

    def spy(code: Any, *scopes: Any) -> Any:
        evaluated.append(str(code))
        return evaluate(code, *scopes)

    monkeypatch.setattr(sympy_parser, "eval", spy, raising=False)  # its module's own name hides the built-in one
    score = REWARDS.get("math_verify")()
    canary = "__import__('os').system('true')"
    texts = [
        f"\\boxed{{{canary}}}",
        f"${canary}$",
        f"$\\text{{{canary}}}$",
        f"$\\variable{{{canary}}}$",
        f"$x_{{{canary}}}$",
    ]
    for text in [*texts, canary, "is 2*(3+4)", "\\boxed{2*(3+4)}", "$2^{3}$", "1{,}234.5", "$1,234.5 e^{2}$", "$0x10$"]:
        score(prompt("14"), text)

    assert evaluated
    assert [
        code for code in evaluated if not re.fullmatch(r"(Integer|Float|Rational) \('?[0-9.]+'? *\)", code.strip())
    ] == []
