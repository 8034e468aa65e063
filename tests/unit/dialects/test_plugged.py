"""A loss and an estimator of the user's own module are names like any other, in every dialect's own key for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.dialects.detect import read_config
from posttrain.registry import ADVANTAGES, POLICY_LOSSES

MODULE = '''
from posttrain.registry import ADVANTAGES, POLICY_LOSSES
raise SystemExit("a plan imports nothing")

@POLICY_LOSSES.register("plugged_loss")
def plugged_loss(policy_logprobs, old_logprobs, advantages, mask, *, factor: float = 1.0):
    """-A log pi."""

@ADVANTAGES.register("plugged_estimator")
def plugged_estimator(rewards, valid, group_index, response_mask):
    """r."""
'''
ROLL = Path(__file__).parents[3] / "examples/roll_rlvr.yaml"
VERL = ["actor_rollout_ref.model.path=m", "data.train_files=[a.parquet]", "data.val_files=[a.parquet]"]
SKYRL = ["trainer.policy.model.path=m", "data.train_data=[a.parquet]"]
NATIVE = ["model.path=m", "data.train_files=[a.parquet]"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module on the path, whose names are forgotten after the test."""
    (tmp_path / "my_plug_in.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (ADVANTAGES, POLICY_LOSSES):
        monkeypatch.setattr(registry, "_plugged", {})
    return "my_plug_in"


@pytest.mark.parametrize(
    ("dialect", "given", "modules", "loss", "estimator"),
    [
        ("native", NATIVE, "model.external_modules=[{}]", "loss.name", "advantage.name"),
        ("verl", VERL, "actor_rollout_ref.model.external_lib={}",
         "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"),
        ("skyrl", SKYRL, "+posttrain.model.external_modules=[{}]",
         "trainer.algorithm.policy_loss_type", "trainer.algorithm.advantage_estimator"),
        ("roll", [], "+posttrain.model.external_modules=[{}]", "+posttrain.loss.name", "+posttrain.advantage.name"),
    ],
)  # fmt: skip
def test_names_of_a_plug_in(
    module: str, dialect: str, given: list[str], modules: str, loss: str, estimator: str
) -> None:
    def problems(*more: str) -> list[str]:
        loaded = read_config(str(ROLL) if dialect == "roll" else None, [*given, *more], dialect)
        if more[:1] == (modules.format(module),) and not loaded.problems:
            assert (loaded.config.loss.name, loaded.config.advantage.name) == ("plugged_loss", "plugged_estimator")
        return [str(problem) for problem in loaded.problems if "plugged" in str(problem)]

    named = [f"{loss}=plugged_loss", f"{estimator}=plugged_estimator"]
    assert problems(*named), "without the module nobody knows them"
    assert problems(modules.format(module), *named) == []


def test_a_module_that_is_not_there_is_reported_by_plan() -> None:
    loaded = read_config(None, [*NATIVE, "model.external_modules=[no_such_plug_in]"], "native")
    assert loaded.problems == ()
    (problem,) = loaded.unsupported
    assert "there is no module no_such_plug_in" in str(problem) and "model.external_modules" in str(problem)
