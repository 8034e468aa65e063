"""Slices of rows as the library datasets means them; expected rows by hand."""

from __future__ import annotations

import pytest

from posttrain.libraries.row_slices import split_slice


@pytest.mark.parametrize(
    ("text", "rows", "expected"),
    [
        ("train[:3]", 10, range(3)),
        ("train[3:5]", 10, range(3, 5)),
        ("train[-2:]", 10, range(8, 10)),
        ("train[:-2]", 10, range(8)),
        ("train[8:20]", 10, range(8, 10)),  # bounds beyond the rows mean their end
        ("train[-20:2]", 10, range(2)),
        ("train[5:3]", 10, range(5, 5)),
        ("train[:]", 10, range(10)),
        ("train[1_0:]", 12, range(10, 12)),
        # 10 % of 37 rows is 3.7, which is closest to 4; 50 % is 18.5, and Python rounds halves to even
        ("train[:10%]", 37, range(4)),
        ("train[:50%]", 37, range(18)),
        ("train[-10%:]", 37, range(33, 37)),
        ("train[10:20%]", 37, range(4, 7)),  # one bound in percent makes both percentages: 3.7 and 7.4
    ],
)
def test_rows_of_a_slice(text: str, rows: int, expected: range) -> None:
    name, part = split_slice(text)
    assert name == "train" and part is not None
    assert part.of(rows) == expected
    assert split_slice(f"train{part}")[1] == part


@pytest.mark.parametrize("text", ["train", "train[3]", "train[a:b]", "train[:101%]", "[:3]", "x[1:2]y"])
def test_other_names_have_no_slice(text: str) -> None:
    assert split_slice(text) == (text, None)


def test_parts_of_a_split_in_percent_cover_it_once() -> None:
    tenths = [split_slice(f"train[{10 * n}%:{10 * n + 10}%]")[1] for n in range(10)]
    assert [row for part in tenths if part is not None for row in part.of(37)] == list(range(37))
