"""The keys that a native configuration may have."""

from __future__ import annotations

import pytest

from posttrain.config.reading.keys import has_key
from posttrain.config.sft import SftConfig


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("run", True),
        ("run.name", True),
        ("run.name.more", False),  # a text
        ("run.nmae", False),
        ("data.train_files.0", True),
        ("reward.terms.0", True),
        ("reward.terms.0.name", True),
        ("reward.terms.0.nmae", False),
        ("reward.terms.0.options.extract", True),  # a mapping of any keys
        ("rollout.engine_options.a.b", True),
        ("environment.named.maze.max_turns", True),
        ("environment.named.maze.max_trns", False),
        ("environment.settings.low", True),
        ("nothing.at.all", False),
    ],
)
def test_items_and_keys_of_mappings_are_known_with_their_field(key: str, known: bool) -> None:
    assert has_key(key) == known


def test_other_configurations_have_other_keys() -> None:
    assert has_key("data.max_tokens", SftConfig) and not has_key("data.max_tokens")
    assert has_key("data.train_files.0", SftConfig) and not has_key("reward.terms.0.options.extract", SftConfig)
