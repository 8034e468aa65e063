"""Numbers that a script lets Python, awk or bc compute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.dialects.scripts.calculations import calculated, in_awk, in_bc
from posttrain.dialects.scripts.filters import filtered
from posttrain.dialects.scripts.launch import read_script
from posttrain.errors import ConfigError

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
    "r=float('1.5'); print(f'{r/(1.0+r):.6f}')",
    "import sys, math\nn = 4\nif n <= 1:\n    L = 9\nelse:\n    x = 1 / (n - 1)\n"
    "    L = 64 + 0.5 * 448 * (1 - math.cos(math.pi * x))\n"
    "print(int(round(L)))",
    "x = 3\nprint(x if x > 2 else 0)",
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
        "x = 'a'\nprint(x)",
        "print(y)",
        "print(1)\nprint(2)",
        "import sys\nprint(sys.argv[1])",
        "print(f'{1:>99999999}')",
        "while True: print(1)",
        "if 1 > 0:\n    print(1)\nprint(2)",
        "(",
    ],
)
def test_other_programs_are_not(program: str) -> None:
    assert calculated(program) is None


RAMP = """
import sys
phase = int(sys.argv[1])
most = int(sys.argv[2])
print(most // 2 if phase < 1 else most)
"""


def test_a_program_behind_a_here_document_reads_its_arguments(tmp_path: Path) -> None:
    """Its text is passed as it is behind 'EOF'; where a shell would expand it, it is not read."""
    assert calculated(RAMP, ["0", "512"]) == "256\n"
    script = tmp_path / "run.sh"
    command = "python3 -m verl.trainer.main_ppo data.max_response_length=$L"
    script.write_text(f"for P in 1; do\nL=$(python - \"$P\" 512 << 'EOF'{RAMP}EOF\n)\n{command}\ndone\n")
    assert "data.max_response_length=512" in read_script(str(script), (), {}, folder=tmp_path).arguments
    script.write_text(f"L=$(/opt/mine/bin/python -c 'print(2 * 8)')\n{command}\n")
    assert "data.max_response_length=16" in read_script(str(script), (), {}, folder=tmp_path).arguments
    script.write_text(f"N=8\nL=$(python3 - <<EOF\nprint($N * 2)\nEOF\n)\n{command}\n")
    with pytest.raises(ConfigError, match="is the output of a program"):
        read_script(str(script), (), {}, folder=tmp_path)


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
