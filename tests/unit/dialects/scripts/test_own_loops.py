"""A checkout's own training loop behind verl's name of the program: named in the plan, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.request import load_request
from posttrain.dialects.scripts.launch import Launch, read_script
from posttrain.errors import ConfigError

FIT = """
class RayPPOTrainer:
    def _compute(self, batch):
        return self.reward_fn(batch)
    def fit(self):
        for batch in self.train_dataloader:
            batch = self.actor_rollout_wg.generate_sequences(batch)
            {reward}
            {call}
            self.actor_rollout_wg.update_actor(batch)
"""
SCORES = "batch.union(compute_reward(batch, self.reward_fn))"


def launched(
    folder: Path, package: str, *, reward: str = SCORES, call: str = "print(batch)", within: str = ""
) -> Launch:
    """A launch of ``PACKAGE.main_ppo`` in a checkout whose trainer stands beside that program."""
    root = folder / within
    home = root.joinpath(*package.split("."))
    (home / "ppo").mkdir(parents=True)
    (home / "main_ppo.py").write_text(
        f"from {package}.ppo.ray_trainer import RayPPOTrainer\nRayPPOTrainer(config=1).fit()\n"
    )
    (home / "ppo/ray_trainer.py").write_text(FIT.format(reward=reward, call=call))
    script = folder / "run.sh"
    script.write_text(f"python3 -m {package}.main_ppo algorithm.adv_estimator=grpo\n")
    return read_script(str(script), (), {}, folder=folder)


@pytest.mark.parametrize("package", ["verl.trainer", "mine.trainer"])
@pytest.mark.parametrize(
    "call", ["print(batch)", "self._save_samples(batch)", "compute_reward_metrics(batch)", "batch.clone()"]
)
def test_a_loop_that_differs_in_its_reports_alone_is_verls(tmp_path: Path, package: str, call: str) -> None:
    assert launched(tmp_path, package, call=call).asks == ()


@pytest.mark.parametrize("within", ["", "verl"])
def test_a_forks_loop_behind_verls_name_is_named_with_its_lines(tmp_path: Path, within: str) -> None:
    (asked,) = launched(tmp_path, "verl.trainer", call="batch = keep_the_middle(batch)", within=within).asks
    assert "RayPPOTrainer.fit (line 5 of" in asked.what
    assert "calls keep_the_middle (line 9), which verl's does not" in asked.what and "run.sh:1" in asked.where


def test_a_loop_of_another_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine.trainer.main_ppo is refused: .* calls keep_the_middle \(line 9\)"):
        launched(tmp_path, "mine.trainer", call="batch = keep_the_middle(batch)")


@pytest.mark.parametrize("package", ["verl.trainer", "mine.trainer"])
def test_a_loop_whose_sampler_plays_episodes_of_its_own_is_refused(tmp_path: Path, package: str) -> None:
    with pytest.raises(ConfigError, match=r"passes the sampler to Manager \(line 9\)"):
        launched(tmp_path, package, call="Manager(wg=self.actor_rollout_wg)")


def test_a_loop_without_rewards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="computes no rewards: its own sampler"):
        launched(tmp_path, "verl.agent_trainer", reward="batch.scores")


def test_rewards_of_a_method_that_the_loop_calls_count(tmp_path: Path) -> None:
    (asked,) = launched(tmp_path, "verl.trainer", reward="batch = self._compute(batch)", call="batch").asks
    assert "calls _compute (line 8)" in asked.what


def test_several_calls_are_listed_together(tmp_path: Path) -> None:
    (asked,) = launched(tmp_path, "verl.trainer", call="[one(), two(), three(), four(), five(), six()]").asks
    assert "one (line 9), two (line 9), three (line 9), four (line 9) and 2 more" in asked.what


def test_a_run_needs_a_forks_loop_confirmed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(tmp_path, "verl.trainer", call="batch = keep_the_middle(batch)")
    monkeypatch.chdir(tmp_path)
    given = ["run.sh", "data.train_files=t.parquet", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"]
    loaded = load_request(given, None, here=True, skip_files=True)
    (asked,) = [each for each in loaded.unsupported if "keep_the_middle" in each.what]
    assert asked.fix.endswith("+posttrain.own_keys=[RayPPOTrainer.fit]")
    confirmed = [*given, "+posttrain.own_keys=[RayPPOTrainer.fit]"]
    assert not load_request(confirmed, None, here=True, skip_files=True).unsupported
