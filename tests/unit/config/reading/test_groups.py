"""Options of groups that overrides add from the folders of hydra.searchpath."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.reading.compose import compose
from posttrain.config.reading.groups import add_groups
from posttrain.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "small.yaml").write_text("turns: 4\nbox:\n  image: plain\n")
    (tmp_path / "agent" / "moved.yaml").write_text("# @package trial.agent\n\nturns: 6\n")
    return tmp_path


def test_an_option_stands_below_its_group_and_under_later_overrides(folder: Path) -> None:
    """As in Hydra, overrides of values count after all options, wherever they are written."""
    texts = ["agent.turns=9", f"hydra.searchpath=[file://{folder}]", "+agent=small", "+other=small"]
    composed = compose(None, texts, struct=True, groups=add_groups)
    assert composed.values == {"agent": {"turns": 9, "box": {"image": "plain"}}, "other": "small"}
    assert composed.sources.where("agent.box.image").endswith("small.yaml:3 agent.box.image")
    assert not composed.problems and "hydra.searchpath" in composed.hydra


def test_a_file_may_name_its_own_place(folder: Path) -> None:
    texts = [f"hydra.searchpath=[file://{folder}]", "++agent=moved.yaml", "trial.agent.turns=7"]
    assert compose(None, texts, struct=True, groups=add_groups).values == {"trial": {"agent": {"turns": 7}}}


def test_without_the_folder_or_the_plus_it_is_a_text(folder: Path) -> None:
    assert compose(None, ["+agent=small"], groups=add_groups).values == {"agent": "small"}
    found = [f"hydra.searchpath=[file://{folder}]", "agent=small"]
    assert compose(None, found, groups=add_groups).values == {"agent": "small"}


def test_a_broken_option_is_named(folder: Path) -> None:
    (folder / "agent" / "broken.yaml").write_text("turns: [1\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        compose(None, [f"hydra.searchpath=[file://{folder}]", "+agent=broken"], groups=add_groups)
