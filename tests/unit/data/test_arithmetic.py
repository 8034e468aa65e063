"""Generated arithmetic: every question once, its answer right, and the split stable."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from posttrain.data.arithmetic import Arithmetic, answer_to, write_arithmetic
from posttrain.errors import ConfigError, DataError


def test_expressions_and_answers_by_hand() -> None:
    sums = Arithmetic(task="sums", numbers=3)
    # 10^3 choices of numbers, the first fastest, then two signs: number 000 with both signs +, ..., 999 with both signs -.
    assert sums.questions == 4000
    assert [sums.expression(index) for index in (0, 321, 1321, 3999)] == [
        "0 + 0 + 0",
        "1 + 2 + 3",
        "1 - 2 + 3",
        "9 - 9 - 9",
    ]
    assert [answer_to(each) for each in ("1 + 2 + 3", "1 - 2 + 3", "9 - 9 - 9", "7 * 8", "2 * 3 * 0")] == [
        6,
        2,
        -9,
        56,
        0,
    ]


@pytest.mark.parametrize("task", [Arithmetic(task="sums"), Arithmetic(task="products", digits=2)])
def test_every_question_is_another_and_python_agrees(task: Arithmetic) -> None:
    written = [task.expression(index) for index in range(min(task.questions, 500))]
    assert len(set(written)) == len(written)
    assert all(answer_to(each) == eval(each) for each in written)  # noqa: S307 (our own expressions)


def test_the_whole_of_a_task_is_split_without_overlap(tmp_path: Path) -> None:
    write_arithmetic(tmp_path / "a", Arithmetic(task="sums"), train_rows=120, validation_rows=80, seed=1)
    write_arithmetic(tmp_path / "b", Arithmetic(task="sums"), train_rows=10, validation_rows=80, seed=1)
    write_arithmetic(tmp_path / "c", Arithmetic(task="sums"), train_rows=10, validation_rows=80, seed=2)
    rows = {
        (name, split): pq.read_table(tmp_path / name / f"{split}.parquet").to_pylist()
        for name in "abc"
        for split in ("train", "validation")
    }
    asked = [row["prompt"][0]["content"] for split in ("train", "validation") for row in rows["a", split]]
    assert len(set(asked)) == 200 and "Calculate 3 - 8 and answer with the number." in asked
    assert rows["a", "validation"] == rows["b", "validation"] != rows["c", "validation"]
    assert rows["a", "train"][:10] == rows["b", "train"]
    row = rows["a", "train"][0]
    assert (row["data_source"], row["reward_model"]["style"]) == ("arithmetic/sums", "rule")
    assert int(row["reward_model"]["ground_truth"]) == answer_to(row["extra_info"]["expression"])


def test_what_cannot_be_asked_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"products of 2 numbers with at most 1 digits has 100 questions; 101 are requested"
    ):
        write_arithmetic(tmp_path, Arithmetic(task="products"), train_rows=100, validation_rows=1, seed=1)
    with pytest.raises(ConfigError) as caught:
        write_arithmetic(tmp_path, Arithmetic(task="sum", digits=9), train_rows=0, validation_rows=1, seed=1)
    assert [problem.what for problem in caught.value.problems] == [
        "there is no arithmetic task called 'sum' (known: sums, products)",
        "digits is 9",
        "train_rows is 0",
    ]
