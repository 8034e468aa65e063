"""Names that were registered by code outside the package stand beside those of its files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from posttrain.config import RunConfig
from posttrain.dialects.checks import check
from posttrain.errors import UnknownName
from posttrain.registry import ADVANTAGES, ENVS


@pytest.fixture
def mine() -> Iterator[None]:
    @ENVS.register("coin")
    def coin(*, sides: int, faces: str = "ht") -> str:
        return faces[:sides]

    @ADVANTAGES.register("mine")
    class Mine:
        def __init__(self, rewards: list[float], valid: list[bool], *, clip_low: float):
            self.sum = sum(rewards)

    yield
    del ENVS._stated["coin"], ADVANTAGES._stated["mine"]
    del ENVS._entries["coin"], ADVANTAGES._entries["mine"]


def test_a_function_and_a_class_are_listed_and_described(mine: None) -> None:
    assert {"coin", "frozen_lake"} <= set(ENVS.names())
    assert tuple(ENVS.settings("coin")) == ("sides", "faces") and ENVS.inputs("coin") == ()
    assert tuple(ADVANTAGES.settings("mine")) == ("clip_low",) and ADVANTAGES.inputs("mine") == ("rewards", "valid")
    assert ENVS.get("coin")(sides=1) == "h"
    with pytest.raises(UnknownName, match="coin, frozen_lake"):
        ENVS.get("dice")


def test_settings_of_an_environment_from_outside_are_checked(mine: None) -> None:
    needed = {"model": {"path": "m"}, "data": {"train_files": ["a.jsonl"]}}
    config = RunConfig.model_validate(needed | {"environment": {"name": "coin", "settings": {"side": 2}}})
    [problem] = [each for each in check(config) if "environment.settings" in (each.field or "")]
    assert "side" in problem.what and "sides" in problem.fix
