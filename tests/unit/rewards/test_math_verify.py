"""The two rewards that stand on math-verify, and what of a text reaches an evaluator on the way."""

from __future__ import annotations

import builtins
import importlib
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


# A blank between groups of three digits, as LaTeX and typesetters write it.
GAPS = [
    "\\,",
    "\\;",
    "\\:",
    "\\ ",
    "\\!",
    "~",
    " ",
    "{,}",
    "\\thinspace ",
    "\\, ",
    "{\\,}",
    "\u2009",
    "\u202f",
    "\u00a0",
]


@pytest.mark.parametrize("gap", GAPS)
def test_groups_of_three_digits_are_one_number(gap: str) -> None:
    score = REWARDS.get("math_verify")()
    small, large, decimals = f"10{gap}000", f"-1{gap}234{gap}567", f"3{gap}000.5"
    for written, plain, product in (
        (small, "10000", "0"),
        (large, "-1234567", "-158634 "),
        (decimals, "3000.5", "1.5"),
    ):
        assert score(prompt(plain), f"so \\boxed{{{written}}}") == 1
        assert score(prompt(plain), f"so ${written}$.") == 1
        assert score(prompt(written), f"\\boxed{{{plain}}}") == 1
        assert score(prompt(written), f"\\boxed{{{written}}}") == 1
        assert score(prompt(product), f"\\boxed{{{written}}}") == 0
        assert score(prompt("0"), f"\\boxed{{{written}}}") == 0


@pytest.mark.parametrize(
    ("truth", "response", "right"),
    [
        ("3.141592", "\\boxed{3.141\\,592}", 1),
        ("3000", "it is 3 000 in all", 1),
        ("3000", "it is 3\u202f000 in all", 1),
        ("(1,200)", "\\boxed{(1, 200)}", 1),
        (
            "\\begin{pmatrix}1 & 200\\\\3 & 400\\end{pmatrix}",
            "\\boxed{\\begin{pmatrix}1&200\\\\3&400\\end{pmatrix}}",
            1,
        ),
        ("6x", "\\boxed{2\\,3x}", 1),  # no group of three digits: a product
        ("100", "\\boxed{10^2}", 1),
    ],
)
def test_groups_of_digits_among_other_signs(truth: str, response: str, right: float) -> None:
    assert REWARDS.get("math_verify")()(prompt(truth), response) == right


@pytest.mark.parametrize(
    "truth", ["50\\%", "50%", "$50\\%$", "\\boxed{50\\%}", "50 \\%", "50\\,\\%", "50\\text{\\%}", "50 percent"]
)
def test_a_per_cent_sign(truth: str) -> None:
    """50 % is 1/2; where only one of the two has the sign, its number is right as well."""
    score = REWARDS.get("math_verify")()
    for right in ("50\\%", "50%", "50", "0.5", "\\frac{1}{2}", "50.0\\%", "50 \\text{ percent}"):
        assert score(prompt(truth), f"\\boxed{{{right}}}") == 1, right
        assert score(prompt(truth), f"so ${right}$") == 1, right
    assert score(prompt(truth), "so it is 50%.") == 1
    assert score(prompt("0.5"), "so it is 50%.") == 1
    assert score(prompt("50"), "\\boxed{50\\%}") == 1
    for wrong in ("5\\%", "5000\\%", "5000", "0.005", "0.5\\%", "49"):
        assert score(prompt(truth), f"\\boxed{{{wrong}}}") == 0, wrong
    assert score(prompt("50"), "\\boxed{0.5}") == 0


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ("12.5\\%", "0.125", "1.25"),
        ("-3\\%", "-0.03", "0.03"),
        ("\\frac{1}{2}\\%", "0.005", "0.05"),
        ("x = 20\\%", "x = 0.2", "x = 0.02"),
        ("10\\%, 20\\%", "0.1, 0.2", "0.1, 0.02"),
        ("1\\,000\\%", "10", "100"),
    ],
)
def test_a_per_cent_sign_in_other_references(truth: str, right: str, wrong: str) -> None:
    scores = [REWARDS.get("math_verify")()(prompt(truth), f"\\boxed{{{answer}}}") for answer in (truth, right, wrong)]
    assert scores == [1, 1, 0]


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
    importlib.import_module("sympy.physics.units")  # evaluates its own names as it is imported
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
