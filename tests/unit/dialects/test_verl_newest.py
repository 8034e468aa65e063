"""Keys of verl 0.7.1 to 0.9: later names and sections, files chosen by a group, kept responses, empty legacy sections."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import TRAIN
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.verl import DIALECT
from posttrain.dialects.verl.ledger import LEDGER

PPO = ("algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=fsdp")


@cache
def read(*overrides: str) -> LoadedConfig[Any]:
    return read_dialect(DIALECT, None, list(overrides), entry=TRAIN, version="")


def said(*overrides: str) -> str:
    return "\n".join(str(problem) for problem in read(*overrides).problems)


def test_both_names_of_a_setting_may_agree_and_may_not_differ() -> None:
    both = ("critic.fsdp.fsdp_size=2", "critic.model.fsdp_config.fsdp_size=2")
    assert "later name" not in said(*PPO, *both)
    differ = said(*PPO, both[0], "critic.model.fsdp_config.fsdp_size=1")
    assert (
        "critic.fsdp.fsdp_size is the later name of critic.model.fsdp_config.fsdp_size, and they are 2 and 1" in differ
    )


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (("+actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",), 2),
        (("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",), 2),
        (
            (
                "+actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4",
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            ),
            2,
        ),
    ],
)
def test_the_roles_own_size_decides_where_it_is_above_one(overrides: tuple[str, ...], sizes: int) -> None:
    loaded = read("trainer.n_gpus_per_node=4", "actor_rollout_ref.model.use_remove_padding=True", *overrides)
    assert loaded.config.policy.sequence_parallel == sizes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+actor_rollout_ref.actor.qat.enable=True", "quantisation-aware training is not built"),
        ("+actor_rollout_ref.rollout.disaggregation.enabled=True", "disaggregation.enabled is refused"),
        ("+skip.rollout.action=repeat", "the responses of another step answer other prompts"),
        ("+trainer.v1.sampler.custom_sampler.path=mine.py", "a ReplayBuffer over verl's TransferQueue"),
    ],
)
def test_what_is_not_built_says_why(override: str, message: str) -> None:
    assert message in said("trainer.n_gpus_per_node=1", override)


def test_steps_that_skip_nothing_are_all_sampled() -> None:
    """verl's list of steps is empty by default, and then none is eligible."""
    rollout = read("trainer.n_gpus_per_node=1", "+skip.rollout_tq.enable=True").config.rollout
    assert rollout.replay_folder is not None
    assert rollout.replay_steps == []


def test_a_file_whose_groups_depend_on_one_of_them_is_composed(tmp_path: Path) -> None:
    """verl's ppo_trainer.yaml since 0.7.1: ``${model_engine}`` names files, and a file may choose another engine for it."""
    for name, text in {
        "ppo_trainer.yaml": "defaults:\n  - model_engine: dp\n  - actor@actor_rollout_ref.actor: ${model_engine}_actor\n"
        "  - _self_\ntrainer: {n_gpus_per_node: 2}\n",
        "ppo_megatron_trainer.yaml": "defaults:\n  - ppo_trainer\n  - override model_engine: megatron\n  - _self_\n",
        "model_engine/dp.yaml": "# @package _global_\nmodel_engine: dp\n",
        "model_engine/megatron.yaml": "# @package _global_\nmodel_engine: megatron\n",
        "actor/dp_actor.yaml": "strategy: fsdp\ngrad_clip: 0.5\n",
        "actor/megatron_actor.yaml": "strategy: megatron\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    base = str(tmp_path / "ppo_trainer.yaml")
    sharded = read_config(base, [], "verl").config.policy
    assert (sharded.engine, sharded.optimizer.max_grad_norm) == ("fsdp", 0.5)
    assert read_config(base, ["model_engine=megatron"], "verl").config.policy.engine == "megatron"
    assert read_config(str(tmp_path / "ppo_megatron_trainer.yaml"), [], "verl").config.policy.engine == "megatron"


def test_a_checkout_without_verls_file_of_the_data_section_has_its_defaults(tmp_path: Path) -> None:
    """Forks whose git ignores folders called data do not hold verl/trainer/config/data/legacy_data.yaml."""
    file = tmp_path / "ppo_trainer.yaml"
    file.write_text("defaults:\n  - data@data: legacy_data\n  - _self_\ntrainer: {n_gpus_per_node: 2}\n")
    ours = read_config("ppo_trainer", ["trainer.n_gpus_per_node=2", "data.max_prompt_length=99"], "verl")
    theirs = read_config(str(file), ["data.max_prompt_length=99"], "verl")
    assert theirs.config.data == ours.config.data and theirs.config.data.max_prompt_tokens == 99
    (tmp_path / "data").mkdir()
    (tmp_path / "data/legacy_data.yaml").write_text("train_batch_size: 77\n")
    assert read_config(str(file), [], "verl").config.data.prompts_per_step == 77


def test_sections_that_later_files_empty_have_their_defaults(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for key in LEDGER.emptied:
        *above, name = key.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[name] = None
    file = tmp_path / "run.yaml"
    file.write_text(
        "algorithm: {adv_estimator: grpo}\n" + "\n".join(f"{name}: {_flow(value)}" for name, value in tree.items())
    )
    loaded = read_config(str(file), ["trainer.n_gpus_per_node=1"], "verl")
    assert [str(problem) for problem in loaded.problems if "not null" in str(problem)] == []
    assert loaded.config.reward == read("trainer.n_gpus_per_node=1", "algorithm.adv_estimator=grpo").config.reward


def _flow(value: Any) -> str:
    if value is None:
        return "null"
    return "{" + ", ".join(f"{name}: {_flow(one)}" for name, one in value.items()) + "}"


def test_a_sampler_on_no_machines_of_its_own_shares_the_trainers() -> None:
    loaded = read(
        "trainer.n_gpus_per_node=2",
        "+actor_rollout_ref.rollout.nnodes=0",
        "+actor_rollout_ref.rollout.n_gpus_per_node=8",
    )
    assert (loaded.config.rollout.devices, loaded.config.placement.devices) == (None, 2)
