"""Every mapped key of every dialect changes our configuration as the example of its row says."""

from __future__ import annotations

import pytest

from .examples import PEERS, Example, examples, read, value

EXAMPLES = [example for dialect in PEERS for example in examples(dialect)]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_key_decides_its_field(example: Example) -> None:
    before = read(example.dialect, example.entry, example.given)
    after = read(example.dialect, example.entry, example.given, example.override)
    assert not after.problems, [str(problem) for problem in after.problems]
    found = value(after.config, example.field)
    assert found == (pytest.approx(example.expected) if isinstance(example.expected, float) else example.expected)
    assert type(found) is type(example.expected) or isinstance(example.expected, float)
    assert example.only_value or value(before.config, example.field) != found
