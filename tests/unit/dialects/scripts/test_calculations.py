"""Numbers that a script lets Python, awk or bc compute."""

from __future__ import annotations

import subprocess
import sys

import pytest

from posttrain.dialects.scripts.calculations import calculated, in_awk, in_bc
from posttrain.dialects.scripts.filters import filtered

PROGRAMS = [
    "print(3 * 8)",
    "print(int(7 / 2 + 0.5))",
    "print(2048 * 4 // 3, )",
    "import math; print(math.ceil(100 / 8))",
    "print(round(0.1 * 3, 2))",
    "print(max(1, 8 - 9))",
    "print(-3 ** 2)",
    "print(3 > 2)",
    "print(1e-6 * 2)",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_python_prints_is_computed(program: str) -> None:
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert calculated(program) == said


@pytest.mark.parametrize(
    "program",
    [
        "print(open('x').read())",
        "import os; print(1)",
        "print(9 ** 9 ** 9)",
        "print(1 / 0)",
        "print('a' * 9)",
        "x = 1",
        "print(1, 2)",
        "(",
    ],
)
def test_other_programs_are_not(program: str) -> None:
    assert calculated(program) is None


def test_awk_and_bc_round_as_they_do() -> None:
    assert in_awk('BEGIN {printf "%d", 7/2}') == "3"
    assert in_awk('BEGIN {printf("%.2f\\n", 1/3)}') == "0.33\n"
    assert in_awk('BEGIN {system("x")}') is None
    assert in_bc("7 / 2", library=False) == "3\n"
    assert in_bc("7 / 2", library=True) is None  # 3.50000000000000000000, which no key of a trainer takes for granted
    assert in_bc("0.5 * 2", library=False) is None


def test_a_filter_with_another_option_is_unknown() -> None:
    assert filtered(["cut", "-d,", "-f2"], "a,b\n") == ("b\n", True)
    assert filtered(["cut", "-d,", "-f2", "--complement"], "a,b\n") is None
    assert filtered(["grep", "-c", "a"], "a\n") is None
    assert filtered(["grep", "-q", "b"], "a\n") == ("", False)
    assert filtered(["md5sum"], "a") is None
