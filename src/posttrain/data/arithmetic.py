"""Generated arithmetic with exact answers: tasks that need no download and no library.

Every question has a number, from which it is written; so the questions of a task can be counted, and none occurs twice.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.errors import ConfigError, DataError, Problem, did_you_mean
from posttrain.libraries.folders import make_folder

# The signs between the numbers, and the sign as it is written in a question.
SIGNS = {"sums": "+-", "products": "*"}
MAX_NUMBERS, MAX_DIGITS = 8, 6
SOURCE = "arithmetic"

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64(), "expression": pa.string()}),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """A task: expressions of ``numbers`` whole numbers from 0 to 10^digits - 1, joined by the task's signs."""

    task: str
    numbers: int = 2
    digits: int = 1

    def problems(self) -> list[Problem]:
        """Return the problems of settings that make no task."""
        found = []
        if self.task not in SIGNS:
            what = f"there is no arithmetic task called {self.task!r} (known: {', '.join(SIGNS)})"
            found.append(Problem(what, fix=did_you_mean(self.task, SIGNS, listed=True)))
        for name, low, high in (("numbers", 2, MAX_NUMBERS), ("digits", 1, MAX_DIGITS)):
            if not low <= (value := getattr(self, name)) <= high:
                found.append(Problem(f"{name} is {value}", fix=f"use {low} to {high}"))
        return found

    @property
    def questions(self) -> int:
        """Number of different questions."""
        return int((10**self.digits) ** self.numbers * len(SIGNS[self.task]) ** (self.numbers - 1))

    def expression(self, index: int) -> str:
        """Write the expression with this number, 0 to ``questions - 1``: its digits choose the numbers and then the signs."""
        values, signs = [], []
        for _ in range(self.numbers):
            index, value = divmod(index, 10**self.digits)
            values.append(value)
        for _ in range(self.numbers - 1):
            index, sign = divmod(index, len(SIGNS[self.task]))
            signs.append(SIGNS[self.task][sign])
        return str(values[0]) + "".join(f" {sign} {value}" for sign, value in zip(signs, values[1:], strict=True))


def answer_to(expression: str) -> int:
    """Calculate an expression as ``Arithmetic.expression`` writes it: sums from left to right, or a product."""
    first, *rest = expression.split()
    pairs = list(zip(rest[::2], map(int, rest[1::2]), strict=True))
    if any(sign == "*" for sign, _ in pairs):
        return math.prod([int(first), *(value for _, value in pairs)])
    return int(first) + sum(value if sign == "+" else -value for sign, value in pairs)


def write_arithmetic(
    folder: Path, task: Arithmetic, *, train_rows: int, validation_rows: int, seed: int, instruction: str | None = None
) -> tuple[Path, Path]:
    """Write train.parquet and validation.parquet of a task into ``folder`` (created if absent; old files are replaced).

    No question occurs twice, neither in one file nor across both; the validation rows are drawn first and stay the same when
    more training rows are requested. The same arguments give the same rows.

    Args: ``instruction`` becomes a system message.
    Returns: the two paths, training first.
    Raises: ConfigError for settings that make no task; DataError when the task does not have that many questions.
    """
    problems = task.problems() + [
        Problem(f"{name} is {rows}", fix="use at least 1")
        for name, rows in (("train_rows", train_rows), ("validation_rows", validation_rows))
        if rows < 1
    ]
    if problems:
        raise ConfigError(problems)
    drawn = _distinct(task, train_rows + validation_rows, seed)
    make_folder(folder)
    for split, chosen in (("train", drawn[validation_rows:]), ("validation", drawn[:validation_rows])):
        beside = folder / f".{split}.parquet.{os.getpid()}"
        pq.write_table(pa.Table.from_pylist(_rows(task, split, chosen, instruction), schema=SCHEMA), beside)
        beside.replace(folder / f"{split}.parquet")
    return folder / "train.parquet", folder / "validation.parquet"


def _distinct(task: Arithmetic, count: int, seed: int) -> list[str]:
    if count > task.questions:
        what = f"{task.task} of {task.numbers} numbers with at most {task.digits} digits has {task.questions} questions"
        fix = "ask for fewer rows, or for more numbers or digits"
        raise DataError(Problem(f"{what}; {count} are requested (training and validation together)", fix=fix))
    draw, found = random.Random(f"{task.task} {seed}"), dict[int, None]()
    while len(found) < count:
        found[draw.randrange(task.questions)] = None
    return [task.expression(index) for index in found]


def _rows(task: Arithmetic, split: str, expressions: Sequence[str], instruction: str | None) -> list[dict[str, object]]:
    system = [{"role": "system", "content": instruction}] if instruction else []
    return [
        {
            "data_source": f"{SOURCE}/{task.task}",
            "prompt": [*system, {"role": "user", "content": f"Calculate {expression} and answer with the number."}],
            "ability": SOURCE,
            "reward_model": {"style": "rule", "ground_truth": str(answer_to(expression))},
            "extra_info": {"split": split, "index": index, "expression": expression},
        }
        for index, expression in enumerate(expressions)
    ]
