"""Which dialect a file is in, seen by its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.dialects.detect import detect, detect_entry, read_config
from posttrain.dialects.entries import ENTRIES
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


@pytest.mark.parametrize(
    ("overrides", "dialect", "entry"),
    [
        (["data.sequences_per_step=8", "model.path=m"], None, "sft"),
        (["data.files=[a]", "output.file=b", "model.path=m"], None, "generate"),
        (["data.files=[a]", "metrics.pass_score=1"], None, "evaluate"),
        (["policy.optimizer.lr=1"], None, "train"),  # several have it, and the first of them is taken
        (["model.partial_pretrain=m", "data.train_batch_size=8"], "verl", "sft"),
        (["data.path=a", "model.path=m", "data.output_path=b", "rollout.temperature=1"], "verl", "generate"),
        (["data.path=a", "data.reward_model_key=rm", "data.response_key=r"], "verl", "evaluate"),
        (["actor_rollout_ref.rollout.n=4"], "verl", "train"),
    ],
)
def test_the_entry_is_seen_by_the_keys(overrides: list[str], dialect: str | None, entry: str) -> None:
    assert detect(None, overrides) == (dialect or "native")
    assert detect_entry(dialect or "native", None, overrides, None).name == entry


@pytest.mark.parametrize(
    ("asked", "overrides", "taken"),
    [
        ("train", ["data.max_tokens=8", "rollout.temperature=1"], "train"),  # one slip in what is clearly this
        ("train", ["data.max_tokens=8", "model.path=m"], "sft"),  # nothing here is of reinforcement learning alone
        ("sft", ["model.path=m", "policy.optimizer.lr=1"], "sft"),  # both have these
        ("sft", ["rollout.temperature=1"], "train"),
        ("sft", ["colour=red"], "sft"),
    ],
)
def test_what_was_asked_for_counts_unless_the_keys_are_anothers(asked: str, overrides: list[str], taken: str) -> None:
    assert detect_entry("native", None, overrides, ENTRIES[asked]).name == taken
