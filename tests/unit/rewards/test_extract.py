from __future__ import annotations

import time
from decimal import Decimal

import pytest

from posttrain.errors import ConfigError
from posttrain.rewards.extract import check_extract, extract_answer, number, same_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is 42.", "42"),
        ("3 + 4 = 7", "7"),
        ("It is -3", "-3"),
        ("It is \u22123", "\u22123"),
        ("5-3", "3"),  # a minus between numbers is no sign
        ("5 - 3", "3"),
        ("so x = -.5", "-.5"),
        ("$1,234.50 in all", "1,234.50"),
        ("1,2,3", "3"),  # a list, not a number in groups
        ("1,2345", "2345"),
        ("version 1.2.3", "1.2"),  # a number does not begin inside another
        ("see x2", None),
        ("7 and x2", "7"),
        ("**12**", "12"),
        ("\\boxed{12}", "12"),
        ("12%", "12"),
        ("\u0664", None),  # an Arabic-Indic digit
        ("none", None),
        ("", None),
    ],
)
def test_last_number(response, answer):
    assert extract_answer(response, "last_number") == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer> 4 </answer> no, <answer>\n 5\n6 \n</answer> done", "5\n6"),
        ("<answer>4</answer> <answer>5", "4"),  # the last complete one
        ("<answer>wait <answer>5</answer>", "5"),
        ("<answer>5</answer> ok </answer>", "5"),
        ("<answer></answer>", ""),
        ("5", None),
        ("<Answer>5</Answer>", None),
    ],
)
def test_tag(response, answer):
    assert extract_answer(response, "tag") == answer


def test_last_line_and_all():
    assert extract_answer("a\n b c \n\n  ", "last_line") == "b c"
    assert extract_answer(" a\nb ", "all") == "a\nb"
    assert extract_answer(" \n", "last_line") is None
    assert extract_answer(" \n", "all") is None


def test_unknown_extract_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"extract is 'lastnumber' \(known: last_number, tag, last_line, all\)"):
        check_extract("lastnumber")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", "12"),
        (" +12.50 ", "12.5"),
        ("\u221212", "-12"),
        ("1,234,567.5", "1234567.5"),
        ("007", "7"),
        ("-0", "0"),
        ("12,34", None),
        ("1e3", None),
        ("1/2", None),
        ("12 km", None),
        ("$12", None),
        ("12.", None),
        ("NaN", None),
        ("", None),
    ],
)
def test_number(text, value):
    assert number(text) == (None if value is None else Decimal(value))


def test_same_answer():
    assert same_answer("12.0", "12")
    assert same_answer("1,234", "1234")
    assert same_answer(" Paris\n", "Paris")
    assert not same_answer("paris", "Paris")
    assert not same_answer("12.01", "12")
    # 0.1 + 0.2 and such: decimals, not binary fractions
    assert not same_answer("0.30000000000000004", "0.3")
    assert not same_answer("__import__('os')", "12")


def test_long_hostile_texts_are_read_in_linear_time():
    start = time.process_time()
    for text in ("<answer>" * 20_000, "1," * 50_000, "9" * 100_000, "1,111" * 20_000):
        for how in ("tag", "last_number"):
            extract_answer(text, how)
    assert time.process_time() - start < 2  # 0.02 s; a pattern that backtracks takes minutes
