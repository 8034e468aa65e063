"""Names that were registered by code outside the package stand beside those of its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from posttrain.config import RunConfig
from posttrain.errors import UnknownName
from posttrain.plan.checks.train import check
from posttrain.registry import ADVANTAGES, ENVS, POLICY_LOSSES, ROLLOUT_ENGINES


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
    with pytest.raises(UnknownName, match="coin, env_manager, frozen_lake"):
        ENVS.get("dice")


def test_settings_of_an_environment_from_outside_are_checked(mine: None) -> None:
    needed = {"model": {"path": "m"}, "data": {"train_files": ["a.jsonl"]}}
    config = RunConfig.model_validate(needed | {"environment": {"name": "coin", "settings": {"side": 2}}})
    [problem] = [each for each in check(config) if "environment.settings" in (each.field or "")]
    assert "side" in problem.what and "sides" in problem.fix


PLUG_IN = """
from posttrain.registry import ADVANTAGES, POLICY_LOSSES

raise SystemExit("a plug-in is read, not run")


@POLICY_LOSSES.register("plugged_loss", has_ratio=False)
def plugged_loss(policy_logprobs, advantages, mask, *, sharpness: float = 2.0):
    '''-A log pi.

    Settings:
        sharpness: of nothing,
            in particular.
    '''
"""


def test_names_of_a_plug_in_are_known_before_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_plug_in_of_losses"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "losses.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    needed = {"model": {"path": "m", "external_modules": ["a_plug_in_of_losses"]}, "data": {"train_files": ["a.jsonl"]}}

    def loss(**settings: Any) -> RunConfig:
        return RunConfig.model_validate(needed | {"loss": {"name": "plugged_loss", **settings}})

    try:
        config = loss(sharpness=3)
        assert check(config) == [] and config.loss.settings == {"sharpness": 3.0}
        assert loss().loss.settings == {"sharpness": 2.0}
        described = POLICY_LOSSES.describe("plugged_loss")
        assert not described.facts.has_ratio and described.inputs == ("policy_logprobs", "advantages", "mask")
        assert described.settings["sharpness"].meaning == "of nothing, in particular."
        with pytest.raises(ValidationError, match="unknown setting"):
            loss(sharpnes=3)
        with pytest.raises(SystemExit):
            POLICY_LOSSES.get("plugged_loss")
    finally:
        POLICY_LOSSES._plugged.clear()
    [problem] = check(RunConfig.model_validate(needed | {"loss": {"name": "plugged_los"}, "model": {"path": "m"}}))
    assert problem.field == "loss.name"


def test_facts_on_several_lines_are_read() -> None:
    """The formatter breaks a long registration behind its bracket."""
    native = ROLLOUT_ENGINES.facts("native")
    assert native.shares_weights and native.reads_images and not native.reads_options
