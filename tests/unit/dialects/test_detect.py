"""Which dialect a file is in, seen by its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.dialects.detect import detect, read_config
from posttrain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("model: {path: x}\ndata: {train_files: [x]}\n", "native"),
        ("rollout: {samples_per_prompt: 4}\n", "native"),
        ("actor_rollout_ref: {rollout: {n: 4}}\ndata: {train_batch_size: 8}\ntrainer: {total_epochs: 1}\n", "verl"),
        ("defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 1}\n", "verl"),
        ("algorithm: {adv_estimator: grpo}\n", "verl"),
        ("trainer: {policy: {model: {path: x}}}\ngenerator: {n_samples_per_prompt: 5}\n", "skyrl"),
        ("data: {train_data: [x]}\n", "skyrl"),
        ("exp_name: x\npretrain: y\nrollout_batch_size: 8\nactor_train: {}\n", "roll"),
        ("defaults:\n  - ../config/traj_envs@_here_\ncustom_envs: {}\ntrain_env_manager: {}\n", "roll"),
    ],
)
def test_by_the_shape_of_a_file(tmp_path: Path, text: str, dialect: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert detect(str(file), []) == dialect


@pytest.mark.parametrize(
    ("overrides", "dialect"),
    [
        (["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"], "verl"),
        (["generator.n_samples_per_prompt=5", "trainer.epochs=1"], "skyrl"),
        (["policy.optimizer.lr=1"], "native"),
        ([], "native"),
    ],
)
def test_by_overrides_alone(overrides: list[str], dialect: str) -> None:
    assert detect(None, overrides) == dialect


def test_a_shape_that_is_nobodys_or_several_is_asked_about(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("colour: red\n")
    with pytest.raises(
        ConfigError, match=r"do not show whose configuration this is, at .*run.yaml; say it with --dialect native\|verl"
    ):
        detect(str(file), [])
    file.write_text("algorithm: {}\nexp_name: x\n")
    with pytest.raises(ConfigError, match=r"whose configuration this is: algorithm \(verl\) and exp_name \(roll\)"):
        detect(str(file), [])


def test_an_unknown_dialect() -> None:
    with pytest.raises(ConfigError, match=r"there is no dialect 'verk' .*did you mean verl\?"):
        read_config(None, [], "verk")
