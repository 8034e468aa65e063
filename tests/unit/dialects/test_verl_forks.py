"""Forks of verl: words and numbers of their own that mean something of verl's, and those that must not count for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.dialects.detect import read_config
from posttrain.dialects.loaded import LoadedConfig

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BASE = (
    "data.train_files=train.parquet",
    "data.train_batch_size=64",
    "algorithm.adv_estimator=grpo",
    f"{A}.ppo_mini_batch_size=16",
    f"{R}.n=4",
    f"{R}.log_prob_micro_batch_size_per_gpu=8",
    "trainer.logger=console",
)
SIZE = f"{A}.ppo_micro_batch_size_per_gpu=8"


def read(*overrides: str, drop: bool = False, version: str = "verl") -> LoadedConfig:
    return read_config(None, [*BASE, *overrides], version, here=True, drop_unknown=drop)


def texts(loaded: LoadedConfig) -> str:
    return "\n".join(str(problem) for problem in (*loaded.problems, *loaded.unsupported))


def test_a_clip_range_of_minus_one_is_that_of_both_sides() -> None:
    loaded = read(SIZE, f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_low=-1", f"{A}.clip_ratio_high=0.28")
    assert not loaded.problems
    assert (loaded.config.loss.clip_ratio_low, loaded.config.loss.clip_ratio_high) == (0.1, 0.28)
    assert any("clip_ratio_low=-1" in warning for warning in loaded.warnings)


@pytest.mark.parametrize("version", ["verl@0.1", "verl@0.2", "verl"])
def test_a_size_that_tokens_replace_need_not_divide_the_mini_batch(version: str) -> None:
    """16 prompts are not whole micro-batches of 64; with micro-batches cut by tokens nothing reads the 64."""
    by_tokens = (f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=24000")
    loaded = read(f"{A}.ppo_micro_batch_size=64", *by_tokens, version=version)
    assert not loaded.problems
    assert loaded.config.policy.max_tokens_per_micro_batch == 24000
    assert "does not divide the mini-batch of 16" in texts(read(f"{A}.ppo_micro_batch_size=64", version=version))


def test_prompts_without_a_chat_template_are_read_as_they_are() -> None:
    assert read(SIZE, "+data.apply_chat_template=False").config.data.templated_prompts == "raw"
    assert read(SIZE, "+data.apply_chat_template=True").config.data.templated_prompts == "error"


def test_a_negative_number_of_shown_generations_shows_all() -> None:
    loaded = read(SIZE, "trainer.log_val_generations=-1")
    assert not loaded.problems and loaded.config.tracking.validation_samples > 100_000
    assert any("verl leaves 1 out" in warning for warning in loaded.warnings)


def test_a_number_of_devices_is_no_number_of_responses() -> None:
    """Of two own keys beside a group of one, the one that counts responses is named, with verl's key for it."""
    loaded = read(SIZE, f"{R}.n=1", "+data.n_gpus_per_node=8", "+agent_grpo.n=16", drop=True)
    assert "your +posttrain.data.n_gpus_per_node" not in texts(loaded) and "agent_grpo.n=16" in texts(loaded)
    assert "a group of one" not in texts(read(SIZE, "+data.n_gpus_per_node=8", drop=True))


def test_of_counts_beside_a_group_of_one_a_bound_comes_last() -> None:
    loaded = read(SIZE, f"{R}.n=1", "+lean.max_samples=10000", "+lean.num_samples=32", drop=True)
    assert f"{R}.n=32" in texts(loaded)
    assert f"{R}.n=10000" in texts(read(SIZE, f"{R}.n=1", "+lean.max_samples=10000", drop=True))


def test_an_option_of_the_checkouts_own_is_left_out_by_its_users_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is offered where the checkout's code has the option; a misspelling, and an estimator, have another way on."""
    code = tmp_path / "verl/trainer/ppo/core_algos.py"
    code.parent.mkdir(parents=True)
    code.write_text("def agg_loss(mode):\n    if mode == 'token-mean-weighted':\n        return 'lead' == mode\n")
    monkeypatch.chdir(tmp_path)
    key, own = f"{A}.loss_agg_mode", f"{A}.loss_agg_mode=token-mean-weighted"
    word = f"+posttrain.own_keys=[{key}]"
    said = texts(read(SIZE, own))
    assert "(verl/trainer/ppo/core_algos.py:2), which is not called" in said and word in said
    loaded = read(SIZE, own, word)
    assert not loaded.problems and loaded.config.loss.aggregation == "token_mean"
    assert any("verl's default 'token-mean' stands in its place" in warning for warning in loaded.warnings)
    of_critic = f"++critic.loss_agg_mode=${{{key}}}"  # as verl's file of the critic has it
    assert not read(SIZE, own, word, of_critic).problems and word in texts(read(SIZE, own, of_critic))
    tools = (f"{R}.name=sglang", f"{R}.multi_turn.enable=True", "data.return_raw_chat=True")
    form = f"{R}.multi_turn.format"
    (code.parent / "tools.py").write_text("@ToolParser.register('simple-tir')\nclass Tir: ...\n")
    assert f"own_keys=[{form}]" in texts(read(SIZE, *tools, f"{form}=simple-tir"))
    assert "simple-tir" not in texts(read(SIZE, *tools, f"{form}=simple-tir", f"+posttrain.own_keys=[{form}]"))
    assert "did you mean token-mean?" in texts(read(SIZE, f"{A}.loss_agg_mode=token-maen"))
    assert "own_keys" not in texts(read(SIZE, "algorithm.adv_estimator=lead"))
    assert "which is verl's and is read" in texts(read(SIZE, word))  # nothing of the user's own is there


def test_a_fork_may_call_disable_disabled() -> None:
    loaded = read(SIZE, "trainer.resume_mode=disabled")
    assert (
        not loaded.problems and loaded.config.run.resume == read(SIZE, "trainer.resume_mode=disable").config.run.resume
    )
    assert any("resume_mode=disabled is read as disable" in warning for warning in loaded.warnings)
    assert "did you mean" in texts(read(SIZE, "trainer.resume_mode=disables"))


def test_samples_of_a_fork_are_asked_for_by_verls_key() -> None:
    assert f"verl's key for it is {R}.n=8" in texts(read(SIZE, "+data.n_samples=8", drop=True))
    assert "n_samples" not in texts(read(SIZE, "+data.n_samples=4", drop=True))  # the value of rollout.n


def test_an_unknown_estimator_asks_for_no_critic() -> None:
    loaded = read(SIZE, "algorithm.adv_estimator=lead", "critic.ppo_micro_batch_size=48")
    assert len(loaded.problems) == 1 and "lead" in str(loaded.problems[0])
