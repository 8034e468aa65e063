"""What a plan says about environments."""

from __future__ import annotations

from posttrain.cli.plan_worlds import episodes_text, worlds_text
from posttrain.config import RunConfig


def config(**environment: object) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": []}, "environment": environment})


def test_one_environment_and_its_settings() -> None:
    text = worlds_text(
        config(name="frozen_lake", settings={"size": 4, "template": "long " * 9}, max_turns=5, workers=0)
    )
    assert text.split("\n           ") == [
        "frozen_lake (size=4, template=long long long long long long…), up to 5 turns",
        "in this process; a training sample is an episode",
    ]


def test_shares_of_named_ones() -> None:
    named = {"a": {"name": "sokoban", "weight": 3}, "b": {"name": "frozen_lake", "max_turns": 2}}
    text = worlds_text(config(named=named, train_episodes=8, sample_per_turn=True))
    assert text.split("\n           ") == [
        "a: 75% of episodes: sokoban",
        "b: 25% of episodes: frozen_lake, up to 2 turns",
        "32 at once; a training sample is a turn",
    ]


def test_a_run_without() -> None:
    assert worlds_text(config()) == ""
    assert (episodes_text(None), episodes_text(8)) == ("", "8 generated episodes")
