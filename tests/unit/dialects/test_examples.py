"""Every mapped key of every dialect changes our configuration as the example of its row says."""

from __future__ import annotations

import pytest

from .examples import PEERS, Example, examples, read, value

EXAMPLES = [example for dialect in PEERS for example in examples(dialect)]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_key_decides_its_fields(example: Example) -> None:
    before = read(example.dialect, example.entry, example.given)
    after = read(example.dialect, example.entry, example.given, example.override)
    assert not after.problems, [str(problem) for problem in after.problems]
    assert example.expected
    for field, expected in example.expected.items():
        found = value(after.config, field)
        assert found == (pytest.approx(expected) if isinstance(expected, float) else expected), field
        assert type(found) is type(expected) or isinstance(expected, float), field
        assert example.only_value or value(before.config, field) != found, field
