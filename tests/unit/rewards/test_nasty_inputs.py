"""What a model may write, against every built-in rule: the score that is right, and the time that it may take."""

from __future__ import annotations

import time
from typing import Any

import pytest

from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS

HUGE = 100_000  # characters


def prompt(truth: Any = "72", **extra_info: Any) -> Prompt:
    return Prompt(prompt_id="a:0", token_ids=(1,), text="?", data_source="t", ground_truth=truth, extra_info=extra_info)


def score(name: str, truth: Any, response: str, **options: Any) -> float:
    result = REWARDS.get(name)(**options)(prompt(truth), response)
    return result["score"] if isinstance(result, dict) else result


# Texts that make a backtracking pattern, a quadratic search or a greedy calculation slow.
SLOW = [
    *("", " ", "\n", "\\", "{", "}", "#### ", "\\boxed", "\\boxed{", "<answer>", "</answer>", "Answer:", "answer is "),
    *("\\boxed{" * (HUGE // 7), "<answer>" * (HUGE // 8), "{" * HUGE, "}" * HUGE, "(" * HUGE, "[" * HUGE, "$" * HUGE),
    *("1" * HUGE, "1," * HUGE, "-" * HUGE, "." * HUGE, "#### 1" * (HUGE // 6), "#" * HUGE, " " * HUGE, "\n" * HUGE),
    *("Answer : " * (HUGE // 9), "\\frac" * (HUGE // 5), "\\sqrt" * (HUGE // 5), "=" * HUGE, "is " * HUGE, "a " * HUGE),
    *("*" * HUGE, "<<" * HUGE, "\\boxed{" + "{" * HUGE + "}" * HUGE + "}", "\\boxed{" + "9" * HUGE + "}"),
    *(
        "\\boxed{9^{9^{9^{9^9}}}}",
        "\\boxed{9**9**9**9}",
        "\\boxed{((((((((((1))))))))))^99999999}",
        "\\text{" * (HUGE // 6),
    ),
    *(
        "<think>" + "</think>" * (HUGE // 8) + "\\boxed{" * 999,
        "A." * HUGE,
        "\x00" * 99,
        "\ud800",
        "\u202e72",
        "é" * HUGE,
    ),
    "\\boxed{__import__('os').system('touch /tmp/posttrain_canary')}",
]
RULES: list[tuple[str, Any, dict[str, Any]]] = [
    ("gsm8k", "72", {}),
    ("gsm8k", "72", {"method": "flexible", "which": "first"}),
    ("math", "72", {}),
    ("math_dapo", "72", {}),
    ("math_dapo", "72", {"strict_box": True}),
    ("prime_math", "72", {}),
    ("geo3k", "72", {}),
    ("search", {"target": ["72"]}, {}),
    ("search", "72", {"match": "subem"}),
    ("multiple_choice", "B", {}),
    ("crossthinkqa", "B", {}),
    ("format", None, {"form": "think_answer"}),
    ("format", None, {"form": "think_boxed"}),
    ("exact_match", "72", {"extract": "tag"}),
    ("exact_match", "72", {"extract": "last_number"}),
    *(
        ("ifeval", {"func_name": name, "N": 3, "quantifier": "at most", "keyword_list": ["zz"]}, {})
        for name in ("verify_sentence_constraint", "validate_placeholders", "validate_highlighted_sections")
    ),
    ("ifeval", {"func_name": "validate_json_format"}, {}),
    ("ifeval", {"func_name": "validate_title"}, {}),
    ("length", None, {"max_characters": 100}),
    ("repetition", None, {}),
    ("chance", None, {}),
]


def test_every_reward_that_may_run_in_the_process_that_trains_is_tried() -> None:
    assert set(REWARDS.stating("quick")) <= {name for name, _, _ in RULES}


@pytest.mark.parametrize(("name", "truth", "options"), RULES, ids=lambda value: value if isinstance(value, str) else "")
def test_no_text_is_slow_or_raises(name: str, truth: Any, options: dict[str, Any]) -> None:
    """Some 50 texts of up to 200,000 characters; a quadratic rule would take minutes on one."""
    reward = REWARDS.get(name)(**options)
    for text in SLOW:
        start = time.process_time()
        result = reward(prompt(truth), text)
        assert time.process_time() - start < 5.0, text[:40]
        assert isinstance(result["score"] if isinstance(result, dict) else result, float)


@pytest.mark.parametrize(
    ("truth", "response", "strict", "flexible"),
    [
        ("72", "#### 72", 1, 1),
        ("72", "####  72", 0, 1),  # two blanks
        ("72", "#### 72.", 0, 0),  # the full stop stays
        ("72", "#### $72", 0, 1),
        ("72", "#### 7 2", 0, 0),
        ("1234", "#### 1,234", 1, 0),  # only strict removes commas
        ("1234", "#### 12,34", 1, 0),
        ("-3", "#### -3", 1, 1),
        ("-3", "#### \u22123", 0, 0),  # a minus sign that is no hyphen
        ("3", "#### -3", 0, 0),
        ("5", "#### 5%", 1, 1),
        ("5", "#### 5 cm", 1, 1),
        ("5", "#### **5**", 0, 1),
        ("5", "#### <b>5</b>", 0, 1),
        ("5", "#### \u0665", 0, 0),  # an Arabic-Indic digit
        ("5", "#### \uff15", 0, 0),  # a full-width digit
        ("5", "#### 05", 0, 0),
        ("5", "#### 5e0", 1, 0),  # flexible: the last number is 0
        ("0.5", "#### .5", 0, 0),
        ("5", "#### 5\x00", 1, 1),
        ("5", "##### 5", 1, 1),
        ("5", "#### 5\n#### 6", 0, 0),
        ("5", "#### 6\n#### 5", 1, 1),
        ("5", "#### \n5", 0, 1),
        ("10" * 40, "#### " + "10" * 40, 1, 1),
        ("5", "the answer is five", 0, 0),
        ("5", "#### -", 0, 0),
        ("5", "#### ,5", 1, 0),
        ("5", "x" * HUGE + "#### 5", 1, 1),
        ("5", "#### 5" + "x" * 300, 0, 0),
    ],
)
def test_gsm8k(truth: str, response: str, strict: float, flexible: float) -> None:
    assert score("gsm8k", truth, response) == strict
    assert score("gsm8k", truth, response, method="flexible") == flexible


@pytest.mark.parametrize(
    ("truth", "response", "right"),
    [
        ("5", "\\boxed{5}", 1),
        ("5", "\\boxed{6} then \\boxed{5}", 1),
        ("5", "\\boxed{5} then \\boxed{6}", 0),
        ("5", "\\boxed{\\boxed{5}}", 1),  # the last box is the inner one
        ("5", "\\boxed{5}}}", 1),
        ("5", "\\boxed{{5}", 0),
        ("{5}", "\\boxed{{5}}", 1),
        ("5", "\\fbox{5}", 0),
        ("5", "\\boxed 5$", 1),
        ("5", "\\boxed5", 0),
        ("5", "\\Boxed{5}", 0),
        ("\\frac{1}{2}", "\\boxed{\\frac12}", 1),
        ("\\frac{1}{2}", "\\boxed{1/2}", 1),
        ("\\frac{1}{2}", "\\boxed{.5}", 1),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1),
        ("\\frac{1}{2}", "\\boxed{2/4}", 0),
        ("1000", "\\boxed{1,000}", 0),  # commas stay
        ("1000", "\\boxed{1\\!000}", 1),
        ("50", "\\boxed{50\\%}", 1),
        ("50", "\\boxed{50%}", 0),
        ("5", "\\boxed{5\\text{ cm}}", 1),
        ("5", "\\boxed{5\\text{cm}}", 0),
        ("90", "\\boxed{90^\\circ}", 1),
        ("5", "\\boxed{x=5}", 1),
        ("5", "\\boxed{xyz=5}", 0),
        ("(1,2)", "\\boxed{\\left(1, 2\\right)}", 1),
        ("-5", "\\boxed{-5}", 1),
        ("5", "\\boxed{\uff15}", 0),
        ("5", "\\boxed{<b>5</b>}", 0),
        ("\\sqrt{3}", "\\boxed{\\sqrt3}", 1),
        ("5", "\\boxed{}", 0),
        ("5", "\\boxed{\\sqrt}", 0),
    ],
)
def test_math(truth: str, response: str, right: float) -> None:
    assert score("math", truth, response) == right


@pytest.mark.parametrize(
    ("truth", "response", "right"),
    [
        ("34", "Answer: 34", 1),
        ("34", "answer :34", 1),
        ("34", "ANSWER\n:\n34", 1),
        ("34", "Answer: 34\nAnswer: 35", 0),
        ("34", "Answer: $34$.", 1),
        ("34", "Answer: it is $34$ cm", 1),
        ("34", "Answer: 34 dollars", 1),
        ("34", "Answer: \\$34", 1),
        ("34", "Answer: 34.0", 0),
        ("34", "Answer: 34%", 0),
        ("34", "Answer: **34**", 0),
        ("1000", "Answer: 1,000", 1),
        ("1000", "Answer: 1{,}000", 1),
        ("\\frac{1}{2}", "Answer: \\frac{1}{2}", 1),
        ("0.5", "Answer: \\frac12", 0),
        ("90", "Answer: 90^\\circ", 1),
        ("-34", "Answer: -34", 1),
        ("34", "Answer: \uff13\uff14", 0),
        ("34", "\\boxed{34}", 1),  # no "Answer:", so the box
        ("34", "\\boxed{34}" + "x" * 100, 0),  # beyond the last 100 characters
        ("34", "\\boxed{ 34 }", 0),  # a box counts as it stands
        ("34", "Answer: 35 \\boxed{34}", 0),
        ("34", "Answer: <b>34</b>", 0),
        ("34", "34", 0),
        ("34", "Answer 34", 0),
        ("34", "Answer:\n\n34", 1),
        ("34", "Answer: \\text{34}", 1),
        ("34", "Answer: \\boxed{34}", 1),
        ("34", "Answer: \\boxed{34", 0),
        ("34", "Answer: 34" + " " * 300, 0),
    ],
)
def test_math_dapo(truth: str, response: str, right: bool) -> None:
    result = REWARDS.get("math_dapo")()(prompt(truth), response)
    assert (result["score"], result["acc"]) == ((1.0, True) if right else (-1.0, False))


@pytest.mark.parametrize(
    ("truth", "response", "right"),
    [
        ("0.5", "\\boxed{\\frac{1}{2}}", 1),
        ("\\frac{1}{2}", "\\boxed{2/4}", 1),
        ("1000", "The answer is 1,000 dollars", 1),
        ("-3", "so x = -3", 1),
        ("3", "so x = -3", 0),
        ("50", "\\boxed{50\\%}", 1),
        ("0.5", "\\boxed{50\\%}", 1),  # times or divided by 100
        ("\\pi", "\\boxed{3.14159}", 1),
        ("2\\sqrt{2}", "\\boxed{\\sqrt{8}}", 1),
        ("x+1", "\\boxed{1+x}", 1),
        ("(x+1)^2", "\\boxed{x^2+2x+1}", 1),
        ("x^2", "\\boxed{x^3}", 0),
        ("(1,2)", "\\boxed{(1, 2)}", 1),
        ("(1,2)", "\\boxed{(2,1)}", 0),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix} 1 \\\\ 2.0 \\end{pmatrix}}", 1),
        ("1\\frac{1}{2}", "\\boxed{\\frac{3}{2}}", 1),
        ("5", "\\boxed{5.0}", 1),
        ("5", "\\boxed{5.2}", 0),
        ("5", "The answer is: 5.", 1),
        ("7", "\\boxed{7\\text{ cm}}", 1),
        ("12", "12 is the answer", 1),
        ("yes", "\\boxed{\\text{Yes}}", 1),
        ("seven", "\\boxed{nevse}", 0),  # five letters are a word
        ("9" * 400, "\\boxed{" + "9" * 399 + "8}", 0),  # beyond floats
        ("1", "\\boxed{1/0}", 0),
        ("1", "\\boxed{0/0}", 0),
        ("x", "\\boxed{\\sqrt{x^2}}", 0),  # not for every x
        ("2", "\\boxed{1+1", 0),
        ("5", "\\boxed{\uff26\uff29}", 0),
        ("5", "", 0),
        ("os", "\\boxed{__import__('os')}", 0),
    ],
)
def test_prime_math(truth: str, response: str, right: float) -> None:
    assert score("prime_math", truth, response) == right


@pytest.mark.parametrize(
    ("truth", "response", "expected"),
    [
        ("3", "<think>a</think>\\boxed{3}", 1.0),
        ("3", "\\boxed{3}", 0.9),
        ("3", "<think>a</think>\\boxed{4}", 0.1),
        ("3", "<think>a</think>3", 0.0),
        ("3", " <think>a</think>\\boxed{3}", 0.9),  # something before <think>
        ("3", "<think>a\\boxed{3}</think>", 0.9),
        ("3", "<think></think>\\boxed{3", 0.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 0.9),
        ("3", "\\boxed{3.0}", 0.9),
        ("3", "\\boxed{3.1}", 0.0),
        ("3", "\\boxed{\\frac{6}{2}}", 0.0),  # a whole number is compared with whole numbers only
        ("2.5", "\\boxed{\\frac{5}{2}}", 0.9),
    ],
)
def test_geo3k(truth: str, response: str, expected: float) -> None:
    assert score("geo3k", truth, response) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("truth", "response", "em", "subem"),
    [
        ("Paris", "<answer>Paris</answer>", 1, 1),
        ("Paris", "<answer> the PARIS! </answer>", 1, 1),
        ("Paris", "<answer>Paris, France</answer>", 0, 1),
        ("Paris", "<answer>Lyon</answer><answer>Paris</answer>", 1, 1),
        ("Paris", "<answer>Paris</answer><answer>Lyon</answer>", 0, 0),
        ("Paris", "<answer>Paris</Answer>", 0, 0),
        ("Paris", "<answer><answer>Paris</answer></answer>", 0, 1),
        ({"target": ["Lyon", "Paris"]}, "<answer>paris</answer>", 1, 1),
        ({"target": "Paris"}, "<answer>paris</answer>", 1, 1),
        (["Paris"], "<answer>Par is</answer>", 0, 0),
        ("1000", "<answer>1,000</answer>", 1, 1),
        ("5", "<answer>-5</answer>", 1, 1),  # punctuation goes, the sign with it
        ("the", "<answer>a</answer>", 1, 0),  # both are nothing once articles are gone; nothing is contained in nothing
        ("Zürich", "<answer>zürich</answer>", 1, 1),
        ("Paris", "<answer></answer>", 0, 0),
        ("Paris", "<answer>Paris</answer>" * 11, 0.25, 1),
        ("Paris", "<answer>" * 11 + "Paris</answer>", 0, 1),
    ],
)
def test_search(truth: Any, response: str, em: float, subem: float) -> None:
    assert score("search", truth, response) == em
    assert score("search", truth, response, match="subem") == subem


@pytest.mark.parametrize(
    ("response", "boxed", "anywhere", "loose", "soft", "strict"),
    [
        ("\\boxed{B}", 1, 1, 1, 1, 1),
        ("\\boxed{A}", 0, 0, -1, -0.5, -1),
        ("the answer is B", 0, 1, 1, 0.5, -1),
        ("the answer is A", 0, 0, -1, -1, -1),
        ("B", 0, 1, 1, 0.5, -1),
        ("b", 0, 0, -1, -1, -1),
        ("I think B", 0, 0, -1, -1, -1),  # the first capital letter is I
        ("\\boxed{A}</think>\\boxed{B}", 1, 1, 1, 1, 1),
        ("\\boxed{B}</think>none", 0, 0, -1, -1, -1),
        ("\\boxed{\\text{B}}", 1, 1, 1, 1, 1),
        ("\\boxed{(B) five}", 1, 1, 1, 1, 1),
        ("\\boxed{AB}", 0, 0, -1, -0.5, -1),
        ("\\boxed{B} \\boxed{}", 1, 1, 1, 1, 1),  # an empty box is none
        ("\\boxed{\u0392}", 0, 0, -1, -0.5, -1),  # a Greek capital beta
        ("", 0, 0, -1, -1, -1),
    ],
)
def test_choices(response: str, boxed: float, anywhere: float, loose: float, soft: float, strict: float) -> None:
    assert score("multiple_choice", "B", response) == boxed
    assert score("multiple_choice", "B", response, boxed=False) == anywhere
    for reward_type, expected in (("loose", loose), ("soft", soft), ("strict", strict)):
        assert score("crossthinkqa", "B", response, reward_type=reward_type) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "keeps", "breaks"),
    [
        ("verify_keywords", {"keyword_list": ["Red", "blue"]}, "RED bluebird", "red"),
        ("verify_keyword_frequency", {"word": "red", "N": 2}, "Red, red; redder", "red"),
        ("validate_forbidden_words", {"forbidden_words": ["red"]}, "blue", "bored RED"),
        ("verify_letter_frequency", {"letter": "e", "N": 2}, "eEe", "eee"),
        ("verify_paragraph_count", {"N": 2}, "a\n* * *\nb", "a * * * "),
        ("validate_word_constraint", {"N": 3, "quantifier": "at least"}, "a b c", "a b"),
        ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "a " * 22, "a " * 23),  # a tenth of 20 is 2
        ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, "a b c", "a b c d"),
        ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, "Is it? It is.", "Mr. Bean. "),
        ("verify_sentence_constraint", {"N": 4, "quantifier": "around"}, "A. B. C.", "A. B."),
        ("validate_paragraphs", {"N": 2, "first_word": "So", "i": 2}, "a\n\nSo b", "So a\n\nb"),
        ("verify_postscript", {"postscript_marker": "P.S."}, "a P.S. b", "a P.S. "),
        ("validate_placeholders", {"N": 2}, "[a] [b]", "[a] [b\n]"),
        ("verify_bullet_points", {"N": 2}, "* a\n - b\nc", "* a"),
        ("validate_title", {}, "<<a>> b", "<< >> <<b"),
        ("validate_choice", {"options": ["yes it is", "no"]}, "yes", "maybe"),
        ("validate_highlighted_sections", {"N": 2}, "*a* **b**", "*a* b*\n*"),
        ("validate_sections", {"N": 2, "section_splitter": "SECTION"}, "SECTION a SECTION b", "SECTION a"),
        ("validate_json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1'),
        ("validate_json_format", {}, "[1]", "[" * HUGE),
        ("validate_repeat_prompt", {"original_prompt": "Why?"}, "Why? So.", "So. Why?"),
        ("validate_two_responses", {}, "a ****** b", "a ****** a"),
        ("validate_uppercase", {}, "ABC 1", "ABc"),
        ("validate_lowercase", {}, "abc 1", "abC"),
        ("validate_frequency_capital_words", {"N": 1, "quantifier": "around"}, "Red BLUE", "RED BLUE"),
        ("validate_end", {"end_phrase": "The end."}, "So. The end. \n", "The end. So."),
        ("validate_quotation", {}, '"a"', '"'),
        ("validate_no_commas", {}, "a b", "a, b"),
    ],
)
def test_ifeval(name: str, arguments: dict[str, Any], keeps: str, breaks: str) -> None:
    truth = {"func_name": name, "unused": None, **arguments}
    assert score("ifeval", truth, f"{breaks}</think>\n{keeps}") == 1
    assert score("ifeval", truth, breaks) == 0
    assert score("ifeval", truth, "<think></think> \n") == 0  # a blank response keeps nothing


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (None, "not a mapping"),
        ("{", "not JSON"),
        ("[1]", "not a mapping"),
        ("{}", "no constraint called None"),
        ({"func_name": "validate_no_comma"}, "did you mean validate_no_commas"),
        ({"func_name": "validate_end", "end_phrase": None}, "lacks end_phrase"),
        ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "less than"}, "quantifier is 'less than'"),
    ],
)
def test_ifeval_refuses_what_no_response_could_keep(truth: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score("ifeval", truth, "a")


@pytest.mark.parametrize(
    ("form", "has", "lacks"),
    [
        ("think_answer", " <think>a</think>\n<answer>b</answer> ", "<think>a</think> so <answer>b</answer>"),
        ("think_answer", "<think></think><answer></answer>", "<think>a</think><answer>b</answer><answer>c</answer>"),
        ("think_answer", "<think><b></think><answer>1</answer>", "<answer>b</answer><think>a</think>"),
        ("think_boxed", "<think>a</think> \\boxed{1}", "\\boxed{1}<think>a</think>"),
        ("answer_tag", "x<answer></answer>", "</answer><answer>"),
        ("boxed", "\\boxed{{}}", "\\boxed{{}"),
    ],
)
def test_format(form: str, has: str, lacks: str) -> None:
    assert score("format", None, has, form=form, otherwise=-1.0) == 1
    assert score("format", None, lacks, form=form, otherwise=-1.0) == -1


def test_length_and_repetition() -> None:
    options = {"min_characters": 10, "max_characters": 20, "ramp_characters": 10, "penalty": 2.0}
    # 5 too short: -2 * 5/10; 5 too long the same; 15 too long is the whole penalty
    for characters, expected in ((10, 0), (20, 0), (5, -1.0), (25, -1.0), (35, -2.0), (0, -2.0)):
        assert score("length", None, "x" * characters, **options) == expected
    # 4 three-word sequences, 2 different ("a b a", "b a b"): -0.5 * (1 - 2/4)
    assert score("repetition", None, "a b A b a b") == -0.25
    assert score("repetition", None, "a b") == score("repetition", None, "") == 0.0


def test_chance_rewards_a_share_of_all_responses() -> None:
    """Of 2,000 responses a quarter, 500, within four standard deviations: 4 * sqrt(2000 * 0.25 * 0.75) = 77."""
    scores = [score("chance", None, f"response {number}", share=0.25) for number in range(2000)]
    assert set(scores) == {0.0, 1.0} and abs(sum(scores) - 500) < 77
    assert scores[:5] == [score("chance", None, f"response {number}", share=0.25) for number in range(5)]
    assert score("chance", None, "x", share=0.0) == 0 and score("chance", None, "x", share=1.0) == 1


@pytest.mark.parametrize("name", ["gsm8k", "math", "math_dapo", "prime_math", "geo3k", "search", "multiple_choice"])
@pytest.mark.parametrize("truth", [None, " ", [], {"a": 1}])
def test_a_reference_that_nothing_could_match_is_refused(name: str, truth: Any) -> None:
    with pytest.raises(ValueError, match="the ground truth is"):
        score(name, truth, "\\boxed{5}")
