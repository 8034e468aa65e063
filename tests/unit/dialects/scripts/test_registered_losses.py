"""Losses that a recipe on verl registers beside verl's package, and workers of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.request import load_request
from posttrain.dialects.scripts.own_programs import started_by

MAIN = """
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
def run(config):
    from recipe.mine.workers import MineWorker
    RayPPOTrainer(config, {0: MineWorker}).fit()
"""
WORKERS = """
from .actor import MineActor
class MineWorker:
    pass
"""
ACTOR = """
import recipe.mine.losses
class MineActor:
    pass
"""
LOSSES = """
from verl.trainer.ppo.core_algos import register_policy_loss
@register_policy_loss("mine")
def compute_policy_loss_mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    return (-advantages * log_prob * config.policy_loss.mine.weight * response_mask).sum() / response_mask.sum(), {}
"""
KEYS = (
    "data.train_files=train.parquet",
    "data.train_batch_size=64",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.policy_loss.loss_mode=mine",
    "+actor_rollout_ref.actor.policy_loss.mine.weight=0.5",
    "trainer.logger=console",
)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "recipe/mine"
    home.mkdir(parents=True)
    for name, text in (("main_ppo", MAIN), ("workers", WORKERS), ("actor", ACTOR), ("losses", LOSSES)):
        (home / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_loss_of_a_recipe_is_found_behind_its_workers(checkout: Path) -> None:
    started = started_by(["python3", "-m", "recipe.mine.main_ppo", *KEYS], [checkout])
    assert started is not None
    assert f"++posttrain.loss.path='{checkout}/recipe/mine/losses.py'" in started[1].adds
    loaded = load_request([*KEYS, *started[1].adds], "verl", here=True, skip_files=True)
    assert not loaded.problems
    loss = loaded.config.loss
    assert loss.name == "mine" and loss.settings["config"]["policy_loss"]["mine"]["weight"] == 0.5
    builtin = [word.replace("loss_mode=mine", "loss_mode=gspo") for word in KEYS]
    started = started_by(["python3", "-m", "recipe.mine.main_ppo", *builtin], [checkout])
    assert started is not None and not any("loss.path" in each for each in started[1].adds)


def test_workers_of_its_own_are_to_be_confirmed(checkout: Path) -> None:
    started = started_by(["python3", "-m", "recipe.mine.main_ppo", *KEYS], [checkout])
    assert started is not None
    (asked,) = started[1].asks
    assert asked.field == "main_ppo.workers" and "MineWorker (line 3 of" in asked.what
    main = checkout / "recipe/mine/main_ppo.py"
    main.write_text(MAIN.replace("recipe.mine.workers", "verl.workers.fsdp_workers"))
    started = started_by(["python3", "-m", "recipe.mine.main_ppo", *KEYS], [checkout])
    assert started is not None and started[1].asks == ()


def test_a_loss_that_verls_package_imports_from_a_recipe(checkout: Path) -> None:
    """verl's own program is launched, and a worker of the checkout's copy of verl imports the recipe's losses."""
    worker = checkout / "verl/experimental/worker.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("import recipe.mine.losses\n")
    loaded = load_request(KEYS, "verl", here=True, skip_files=True)
    assert loaded.config.loss.path == "recipe/mine/losses.py"
