r"""prime_math and the brackets of an answer: an open interval, a closed one, a pair and a set are four answers."""

from __future__ import annotations

from itertools import product

import pytest

from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.brackets import elements, enclosing, inward_brackets, plain_brackets

# Every row is one answer in several writings; no two rows are the same answer.
ANSWERS = [
    ["(1,2)", "( 1 , 2 )", "\\left(1, 2\\right)", "\\big( 1,2 \\big)", "\\lparen 1,2 \\rparen", "]1,2[", "\\left]1,2\\right["],
    ["[1,2]", "\\left[1,2\\right]", "\\lbrack 1,2 \\rbrack", "\\bigl[1,2\\bigr]"],
    ["(1,2]", "\\left(1,2\\right]", "]1,2]"],
    ["[1,2)", "\\left[1,2\\right)", "[1,2["],
    ["\\{1,2\\}", "\\left\\{1,2\\right\\}", "\\lbrace 1,2\\rbrace", "{1,2}", "1,2", "1 \\text{ and } 2", "1 or 2"],
    ["\\langle 1,2\\rangle", "\\left\\langle 1, 2\\right\\rangle"],
    ["(1,234)", "(1, 234)"],
    ["[1,234]", "[1, 234]"],
    ["1,234", "1234"],
    ["(-\\infty,\\frac{1}{2})", "(-\\infty, 0.5)", "]-\\infty,1/2["],
    ["(-\\infty,\\frac{1}{2}]", "(-\\infty, 0.5]"],
    ["(0,\\infty)", "(0,+\\infty)"],
    ["[0,\\infty)", "[0,+\\infty)"],
    ["(1,2)\\cup(3,4)", "(3,4) \\cup (1,2)", "(1,2.0)\\cup(3,4)", "(1,2)\u222a(3,4)", "(1,2)U(3,4)", "]1,2[\\cup]3,4["],
    ["(1,2]\\cup(3,4)"],
    ["[1,2]\\cup[3,4]", "\\left[1,2\\right]\\cup\\left[3,4\\right]"],
    ["(1,2)\\cup(3,4)\\cup(5,6)"],
    ["(1,2),(3,4)", "\\{(1,2),(3,4)\\}"],
    ["[1,2],[3,4]", "\\{[1,2],[3,4]\\}"],
    ["((1,2),(3,4))"],
    ["[(1,2),(3,4)]"],
    ["(0,1)\\text{ and }(2,3)"],
    ["(0,1)\\text{ and }(4,5)"],
]  # fmt: skip
WRITINGS = [(row, text) for row, texts in enumerate(ANSWERS) for text in texts]


def prime_math(reference: str, response: str) -> float:
    prompt = Prompt(prompt_id="a:0", token_ids=(1,), text="?", data_source="t", ground_truth=reference, extra_info={})
    result = REWARDS.get("prime_math")()(prompt, response)
    assert isinstance(result, dict)
    return result["score"]


def test_every_writing_is_right_for_its_own_answer_and_wrong_for_every_other() -> None:
    judged = {
        (reference, answer): (prime_math(reference, f"so \\boxed{{{answer}}}"), float(row == other))
        for (row, reference), (other, answer) in product(WRITINGS, WRITINGS)
    }
    assert len(judged) == len(WRITINGS) ** 2 > 2000
    assert {pair: found for pair, found in judged.items() if found[0] != found[1]} == {}


def test_geo3k_looks_at_brackets_too() -> None:
    prompt = Prompt(prompt_id="a:0", token_ids=(1,), text="?", data_source="t", ground_truth="[1,2)", extra_info={})
    results = [REWARDS.get("geo3k")()(prompt, f"\\boxed{{{answer}}}") for answer in ("(1,2)", "\\left[1, 2\\right)")]
    scores = [result["score"] for result in results if isinstance(result, dict)]
    assert scores == [pytest.approx(0.0), pytest.approx(0.9)]


@pytest.mark.parametrize(
    ("reference", "answer"),
    [("5", "(5)"), ("5", "\\{5\\}"), ("\\{0.5\\}", "1/2"), ("(1000,2000)", "(1,000, 2,000)"), ("x", "(x)"), ("1000", "1,000")],
)  # fmt: skip
def test_brackets_around_a_single_value_do_not_matter(reference: str, answer: str) -> None:
    assert prime_math(reference, f"\\boxed{{{answer}}}") == 1.0


def test_the_parts() -> None:
    assert plain_brackets("\\left\\{1,\\lbrack 2 \\bigr)\\cup\\cupcake") == "⦃1,[ 2 )\u222a\\cupcake"
    assert inward_brackets("]0,f(1,2)[\u222a[3,4[") == "(0,f(1,2))\u222a[3,4)"
    assert inward_brackets("(1,2]\u222a(3,4]") == "(1,2]\u222a(3,4]"
    assert [enclosing(text) for text in ("(1)+(2)", "[1,2)", "(", "1", "(1))", "")] == ["", "[)", "", "", "", ""]
    assert elements("[(1,2),3)") == ["(1,2)", "3"]
    assert elements("⦃5⦄") == ["5"]


@pytest.mark.parametrize(
    "response",
    [
        "İİİİİİ the answer is 12",
        "İ " * 50 + "Answer: 12",
        "İİ x = 12 Is The Answer İ",
        "İİİİ = 12",
        "\u212a ẞ ﬁ answer IS 12.",
    ],
)
def test_a_letter_whose_lower_case_is_longer_does_not_move_the_cut(response: str) -> None:
    """``"İ".lower()`` is two characters long."""
    assert prime_math("12", response) == 1.0
    assert prime_math("2", response) == 0.0
