"""sft_trainer.yaml of verl as a whole: its blocks, its versions, and what cannot be; single keys are tested by the examples of
their rows."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import ENTRIES, SFT
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.verl import DIALECT
from posttrain.errors import ConfigError
from posttrain.plan.engines.fsdp import fsdp_settings
from posttrain.plan.roles import place

DOCUMENTS = Path(__file__).parent / "verl_documents"
ONE_DEVICE = ("trainer.n_gpus_per_node=1",)
TURNS = ("data.multiturn.enable=True",)


@cache
def read(*overrides: str, version: str = "") -> LoadedConfig[Any]:
    given = () if version == "0.2" else ONE_DEVICE
    return read_dialect(DIALECT, None, [*given, *overrides], entry=SFT, version=version)


@pytest.mark.parametrize("name", ["sft_trainer_0.4", "sft_trainer_0.4_zh"])
def test_the_pages_block_is_read(name: str) -> None:
    loaded = read_config(str(DOCUMENTS / f"{name}.yaml"), ["trainer.n_gpus_per_node=1"], None)
    assert (loaded.dialect, loaded.entry, loaded.problems) == ("verl", "sft", ())
    config = loaded.config
    assert config.model.path.endswith("models/gemma-1.1-7b-it")
    assert config.model.gradient_checkpointing is False
    assert config.policy.lora is None
    assert config.policy.schedule.name == "cosine"


def test_verls_own_file_alone() -> None:
    config = read().config
    assert config.data.prompt_column == "question" and config.data.response_column == "answer"
    assert config.data.sequences_per_step == 256 and config.policy.sequences_per_micro_batch_per_device == 4
    assert config.policy.optimizer.betas == (0.9, 0.95)
    assert config.checkpoint.upload is None  # the default is somebody's own folder
    assert config.validation.before_training is False and config.validation.after_training is True
    assert config.checkpoint.at_end is True
    assert config.model.gradient_checkpointing is True


def test_version_0_2_validates_and_saves_after_every_epoch() -> None:
    config = read(version="0.2").config
    assert config.validation.each_epoch and config.checkpoint.each_epoch
    assert config.placement.devices == 1
    assert config.model.gradient_checkpointing is False


def test_version_0_2_has_the_cosine_schedule_alone() -> None:
    schedule = read("optim.warmup_steps_ratio=0.2", version="0.2").config.policy.schedule
    assert (schedule.name, schedule.warmup_ratio, schedule.min_lr_ratio) == ("cosine", 0.2, 0.0)
    assert "optim.lr_scheduler" in str(read("optim.lr_scheduler=wsd", version="0.2").problems[0])


def test_a_defaults_list_starts_from_verls_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [sft_trainer, _self_]\noptim: {lr: 2e-5}\ntrainer: {n_gpus_per_node: 1}\n")
    loaded = read_config(str(file), [], None)
    assert (loaded.entry, loaded.config.policy.optimizer.lr, loaded.problems) == ("sft", 2e-5, ())


def test_trained_weights_of_float16_are_float32_with_a_warning() -> None:
    read_fp16 = read("model.fsdp_config.model_dtype=fp16")
    assert (read_fp16.config.model.master_dtype, read_fp16.problems) == ("float32", ())
    said = [text for text in read_fp16.warnings if text.startswith("model.fsdp_config.model_dtype")]
    assert len(said) == 1
    assert "the trained weights are float32" in said[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.chat_template=x", "data.chat_template is refused: verl also stops at any value"),
        ("data.prompt_key=[a,b]", "data.prompt_key names 2 columns, and a prompt is in one"),
        ("model.fsdp_config.model_dtype=fp8", "model_dtype must be one of fp32, bf16, fp16"),
        ("trainer.save_freq=0", "trainer.save_freq is 0, at which verl stops"),
        ("trainer.test_freq=0", "trainer.test_freq is 0, at which verl stops"),
        ("ulysses_sequence_parallel_size=2", "1 devices do not split into groups of 2 that share a sequence"),
        ("optim.lr_scheduler=linear", "optim.lr_scheduler must be one of cosine, wsd, not 'linear'"),
        ("data.truncation=middle", "data.truncation must be one of error, left, right, not 'middle'"),
        ("+optim.warmup_ratio=0.1", "there is no key optim.warmup_ratio in verl 0.4 or later"),
        (
            "data.train_batch_sice=8",
            "there is no key data.train_batch_sice in verl 0.4 or later, .*did you mean data.train_batch_size",
        ),
        ("model.lora_rank=-1", "model.lora_rank is -1"),
        ("+trainer.resume_mode=resume_path", "trainer.resume_from_path names no checkpoint"),
        ("optim.lr=0", "lr must be above 0, not 0"),
        ("+optim.lrs=1e-5", "there is no key optim.lrs in verl 0.4 or later, .*did you mean optim.lr"),
        ("data.custom_cls.path=own.py", "no class in it is named"),
    ],
)
def test_what_is_wrong_is_told_once(override: str, message: str) -> None:
    found = [str(problem) for problem in read(override).problems]
    assert len(found) == 1

    assert re.search(message.replace("(", r"\("), found[0]), found[0]


def test_several_devices_on_two_machines() -> None:
    pytest.importorskip("ray")
    sizes = ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", "ulysses_sequence_parallel_size=2")
    loaded = read(*sizes, "use_remove_padding=True", "model.fsdp_config.cpu_offload=True")
    assert loaded.problems == loaded.unsupported == ()
    plan, problems = place(loaded.config)
    assert plan is not None, problems
    (policy,) = plan.roles
    assert (plan.runtime, plan.nodes, policy.engine) == ("ray", 2, "fsdp")
    assert (policy.sizes.data, policy.sizes.sequence, policy.sizes.shard) == (4, 2, 8)  # 8 devices / 2 that share
    assert fsdp_settings(loaded.config.policy.engine_options, 8)[0].cpu_offload


def test_here_it_runs_on_one_device() -> None:
    loaded = read_dialect(DIALECT, None, ["trainer.n_gpus_per_node=4"], entry=SFT, here=True)
    assert loaded.problems == loaded.unsupported == ()
    assert (loaded.config.placement.devices, loaded.config.policy.engine) == (1, "local")
    assert loaded.changes[0] == "placement.devices (by trainer.n_gpus_per_node): 1 instead of 4"


def test_keys_without_effect_are_told() -> None:
    told = {
        one.key: one.reason for one in read("data.balance_dp_token=True", "data.micro_batch_size=4", *TURNS).ignored
    }
    assert "losses divide by the tokens of the whole step" in told["data.balance_dp_token"]
    assert told["data.micro_batch_size"] == "verl does not read it either"
    told = {one.key: one.reason for one in read(*TURNS, "data.prompt_key=x").ignored}
    assert told["data.prompt_key"] == "data.multiturn.enable reads whole conversations"


def test_the_wrong_command_names_the_right_one() -> None:
    page = str(DOCUMENTS / "sft_trainer_0.4.yaml")
    with pytest.raises(ConfigError, match=rf"this is an SFT configuration: posttrain sft {page}"):
        read_config(page, [], None, entry=ENTRIES["train"])
    with pytest.raises(
        ConfigError, match=r"this is a configuration of reinforcement learning: posttrain train KEY=VALUE"
    ):
        read_config(None, ["actor_rollout_ref.model.path=x"], None, entry=SFT)
    with pytest.raises(ConfigError, match=r"skyrl has no configuration for posttrain tune"):
        read_config(None, [], "skyrl", entry=ENTRIES["tune"])


def test_devices_that_share_a_sequence_are_no_matter_here() -> None:
    """torchrun's own arguments say how many devices there are; --here takes one, whatever shares it."""
    keys = ["data.train_files=t.parquet", "engine.ulysses_sequence_parallel_size=2"]
    refused = read_config("sft_trainer_engine", keys, "verl", entry=SFT, skip_files=True)
    assert any("do not split into groups of 2" in problem.what for problem in refused.problems)
    loaded = read_config("sft_trainer_engine", keys, "verl", entry=SFT, here=True, skip_files=True)
    assert not loaded.problems and loaded.config.policy.sequence_parallel == 1


def test_devices_that_torchrun_gives_are_one_here() -> None:
    """verl 0.2's file says nothing of them, and its launches share a sequence over two."""
    overrides = ["data.train_files=a", "ulysses_sequence_parallel_size=2", "use_remove_padding=True"]
    loaded = read_config("sft_trainer", overrides, "verl@0.2", here=True, entry=SFT)
    assert not loaded.problems and loaded.config.policy.sequence_parallel == 1
    assert any("1 instead of 2" in text for text in loaded.warnings)
    assert read_config("sft_trainer", overrides, "verl@0.2", entry=SFT).problems


@pytest.mark.parametrize("file", ["sft_trainer", "sft_trainer_engine"])
def test_the_processes_of_the_launcher_win_over_the_keys_of_devices(file: str) -> None:
    base = ("data.train_files=x.parquet", "data.val_files=x.parquet", "data.train_batch_size=32")
    sizes = ("ulysses_sequence_parallel_size=4", "use_remove_padding=True") if file == "sft_trainer" else ()
    sizes = sizes or ("engine.ulysses_sequence_parallel_size=4", "++model.path=m")
    started = ("++posttrain.placement.devices=16", "++posttrain.placement.nodes=2", "++trainer.n_gpus_per_node=1")
    loaded = read_config(file, [*base, *sizes, *started], "verl", entry=SFT, skip_files=True)
    assert not loaded.problems, loaded.problems
    found = loaded.config
    assert (found.placement.devices, found.placement.nodes, found.policy.sequence_parallel) == (16, 2, 4)


def test_quantised_training_and_recorded_experts_of_verls_own_file() -> None:
    base = ("data.train_files=x.parquet", "++model.path=m", "trainer.n_gpus_per_node=8")
    held = ("++engine.qat.mode=w4a16", "++engine.router_replay.mode=disabled")
    for strategy in ("fsdp", "megatron"):
        given = [*base, *held, f"engine={strategy}"]
        loaded = read_config(
            "sft_trainer_engine", [*given, "++engine.qat.enable=False"], "verl", entry=SFT, skip_files=True
        )
        assert not loaded.problems and not {"qat", "router_replay"} & set(loaded.config.policy.engine_options)
        loaded = read_config(
            "sft_trainer_engine", [*given, "++engine.qat.enable=True"], "verl", entry=SFT, skip_files=True
        )
        assert [problem.field for problem in loaded.problems] == ["engine.qat.enable"]


@pytest.mark.parametrize(("file", "over"), [("sft_trainer", "epochs"), ("sft_trainer_engine", "run")])
def test_the_later_program_stretches_the_learning_rate_over_the_steps(file: str, over: str) -> None:
    keys = ["data.train_files=a", "trainer.total_training_steps=7", "trainer.total_epochs=2"]
    found = read_config(file, keys, "verl", here=True, entry=SFT).config
    assert (found.run.total_steps, found.run.total_epochs, found.run.within_epochs) == (7, 2, True)
    assert found.policy.schedule_over == over


def test_prompts_and_the_rest_may_have_limits_of_their_own() -> None:
    """pad_mode=left_right of September 2025; later files have one limit."""

    def found(*overrides: str) -> LoadedConfig[Any]:
        keys = ["data.train_files=a", "++model.path=m", "engine=fsdp", *overrides]
        return read_config("sft_trainer_engine", keys, "verl", here=True, entry=SFT)

    parts = ("++data.max_prompt_length=300", "++data.max_response_length=700")
    assert found("data.pad_mode=left_right", *parts).config.data.max_tokens == 1000
    loaded = found("data.max_length=64", *parts)
    assert loaded.config.data.max_tokens == 64
    assert {"data.max_prompt_length", "data.max_response_length"} <= {one.key for one in loaded.ignored}
    [problem] = found("data.pad_mode=left_right", "data.truncation=left").problems
    assert problem.field == "data.truncation"
    [problem] = found("data.pad_mode=maybe").problems
    assert problem.field == "data.pad_mode"
