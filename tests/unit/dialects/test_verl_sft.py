"""sft_trainer.yaml of verl: every mapped key changes our configuration in the stated way."""

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
FOUR = ("trainer.n_gpus_per_node=4",)
TURNS = ("data.multiturn.enable=True",)
OWN = ("data.custom_cls.path=own.py", "data.custom_cls.name=Own")
RANK = ("model.lora_rank=8",)
WANDB = ("trainer.logger=[wandb]",)
PATH = "out/global_step_5"

Case = tuple[str, str, tuple[str, ...], str, Any]  # key, override, what it needs around it, our field, its value then

CASES: list[Case] = [
    ("data.train_batch_size", "data.train_batch_size=64", (), "data.sequences_per_step", 64),
    (
        "data.micro_batch_size_per_gpu",
        "data.micro_batch_size_per_gpu=2",
        (),
        "policy.sequences_per_micro_batch_per_device",
        2,
    ),
    ("data.train_files", "data.train_files=[a.parquet,b.parquet]", (), "data.train_files", ["a.parquet", "b.parquet"]),
    ("data.val_files", "data.val_files=a.parquet", (), "data.validation_files", ["a.parquet"]),
    ("data.prompt_key", "data.prompt_key=[ask]", (), "data.prompt_column", "ask"),
    ("data.response_key", "data.response_key=say", (), "data.response_column", "say"),
    # prompt_key stays question
    ("data.prompt_dict_keys", "data.prompt_dict_keys=[a,b]", (), "data.prompt_column", "question.a.b"),
    ("data.response_dict_keys", "data.response_dict_keys=[a]", (), "data.response_column", "answer.a"),
    ("data.multiturn.enable", "data.multiturn.enable=True", (), "data.messages_column", "messages"),
    ("data.multiturn.messages_key", "data.multiturn.messages_key=chat", TURNS, "data.messages_column", "chat"),
    ("data.multiturn.tools_key", "data.multiturn.tools_key=functions", TURNS, "data.tools_column", "functions"),
    (
        "data.multiturn.enable_thinking_key",
        "data.multiturn.enable_thinking_key=thinks",
        TURNS,
        "data.enable_thinking_column",
        "thinks",
    ),
    ("data.max_length", "data.max_length=512", (), "data.max_tokens", 512),
    ("data.truncation", "data.truncation=left", (), "data.overlong", "truncate_left"),
    ("data.truncation", "data.truncation=right", (), "data.overlong", "truncate_right"),
    ("data.custom_cls.path", "data.custom_cls.path=own.py", OWN[1:], "data.dataset_class_file", "own.py"),
    ("data.custom_cls.path", "data.custom_cls.path=own.py", OWN[1:], "data.dataset_class_mask", "predictions"),
    ("data.custom_cls.path", "data.custom_cls.path=own.py", OWN[1:], "data.dataset_class_options.max_length", 1024),
    ("data.custom_cls.name", "data.custom_cls.name=Other", OWN, "data.dataset_class_name", "Other"),
    ("model.partial_pretrain", "model.partial_pretrain=some/model", (), "model.path", "some/model"),
    ("model.fsdp_config.model_dtype", "model.fsdp_config.model_dtype=bf16", (), "model.master_dtype", "bfloat16"),
    ("model.external_lib", "model.external_lib=mine", (), "model.external_modules", ["mine"]),
    (
        "model.enable_gradient_checkpointing",
        "model.enable_gradient_checkpointing=False",
        (),
        "model.gradient_checkpointing",
        False,
    ),
    ("model.trust_remote_code", "model.trust_remote_code=True", (), "model.trust_remote_code", True),
    ("model.lora_rank", "model.lora_rank=8", (), "policy.lora.rank", 8),
    ("model.lora_alpha", "model.lora_alpha=32", RANK, "policy.lora.alpha", 32.0),
    ("model.target_modules", "model.target_modules=[q_proj]", RANK, "policy.lora.target_modules", ["q_proj"]),
    ("model.strategy", "model.strategy=fsdp", FOUR, "policy.engine", "fsdp"),
    *(
        (
            f"model.fsdp_config.{name}",
            f"{plus}model.fsdp_config.{name}={text}",
            FOUR,
            f"policy.engine_options.{name}",
            value,
        )
        for name, plus, text, value in (
            ("wrap_policy.min_num_params", "", "1000", 1000),
            ("cpu_offload", "", "True", True),
            ("offload_params", "", "True", True),
        )
    ),
    (
        "model.fsdp_config.wrap_policy.**",
        "+model.fsdp_config.wrap_policy.disable=True",
        FOUR,
        "policy.engine_options.wrap_policy.disable",
        True,
    ),
    (
        "ulysses_sequence_parallel_size",
        "ulysses_sequence_parallel_size=2",
        (*FOUR, "use_remove_padding=True"),
        "policy.sequence_parallel",
        2,
    ),
    ("optim.lr", "optim.lr=1e-4", (), "policy.optimizer.lr", 1e-4),
    ("optim.betas", "optim.betas=[0.9,0.98]", (), "policy.optimizer.betas", (0.9, 0.98)),
    ("optim.weight_decay", "optim.weight_decay=0.1", (), "policy.optimizer.weight_decay", 0.1),
    ("optim.warmup_steps_ratio", "optim.warmup_steps_ratio=0.2", (), "policy.schedule.warmup_ratio", 0.2),
    ("optim.clip_grad", "optim.clip_grad=0.5", (), "policy.optimizer.max_grad_norm", 0.5),
    ("optim.lr_scheduler", "optim.lr_scheduler=wsd", (), "policy.schedule.name", "warmup_stable_decay"),
    ("trainer.default_local_dir", "trainer.default_local_dir=out/here", (), "run.folder", "out/here"),
    ("trainer.default_local_dir", "trainer.default_local_dir=out/here", (), "checkpoint.folder", "out/here"),
    ("trainer.default_hdfs_dir", "trainer.default_hdfs_dir=s3://store/run", (), "checkpoint.upload", "s3://store/run"),
    ("trainer.project_name", "trainer.project_name=sums", (), "tracking.project", "sums"),
    ("trainer.experiment_name", "trainer.experiment_name=first", (), "run.name", "first"),
    ("trainer.total_epochs", "trainer.total_epochs=2", (), "run.total_epochs", 2),
    ("trainer.total_training_steps", "trainer.total_training_steps=7", (), "run.total_steps", 7),
    ("trainer.total_training_steps", "trainer.total_training_steps=7", (), "policy.schedule_over", "epochs"),
    ("trainer.logger", "trainer.logger=[console,tracking,file]", (), "tracking.trackers", ["console", "wandb"]),
    ("trainer.logger", "trainer.logger=wandb", (), "tracking.dialect_names", "verl"),
    ("trainer.seed", "trainer.seed=3", (), "run.seed", 3),
    ("trainer.save_freq", "trainer.save_freq=20", (), "checkpoint.every_steps", 20),
    ("trainer.test_freq", "trainer.test_freq=5", (), "validation.every_steps", 5),
    # 2 machines of 4 devices
    ("trainer.nnodes", "trainer.nnodes=2", FOUR, "placement.nodes", 2),
    ("trainer.nnodes", "trainer.nnodes=2", FOUR, "placement.devices", 8),
    ("trainer.n_gpus_per_node", "trainer.n_gpus_per_node=4", (), "placement.devices", 4),
    ("trainer.max_ckpt_to_keep", "trainer.max_ckpt_to_keep=2", (), "checkpoint.keep_last", 2),
    (
        "trainer.checkpoint.save_contents",
        "+trainer.checkpoint.save_contents=[model,extra]",
        (),
        "checkpoint.save_optimizer",
        False,
    ),
    (
        "trainer.checkpoint.load_contents",
        "+trainer.checkpoint.load_contents=[model,extra]",
        (),
        "checkpoint.load_optimizer",
        False,
    ),
    (
        "trainer.checkpoint.load_contents",
        "+trainer.checkpoint.load_contents=[model,optimizer]",
        (),
        "checkpoint.load_schedule",
        False,
    ),
    ("trainer.resume_mode", "+trainer.resume_mode=disable", (), "run.resume", "never"),
    (
        "trainer.resume_from_path",
        f"+trainer.resume_from_path={PATH}",
        ("+trainer.resume_mode=resume_path",),
        "run.resume_path",
        PATH,
    ),
    ("trainer.device", "+trainer.device=cpu", (), "placement.device", "cpu"),
]


@cache
def read(*overrides: str, version: str = "") -> LoadedConfig[Any]:
    given = () if version == "0.2" else ONE_DEVICE
    return read_dialect(DIALECT, None, [*given, *overrides], entry=SFT, version=version)


def value(config: Any, field: str) -> Any:
    node = config
    for part in field.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return node


def test_every_field_of_every_mapped_key_has_a_case() -> None:
    mapped = {row.name: row.fields for row in DIALECT.ledger.of("sft").rows if row.status == "mapped"}
    assert set(mapped) == {key for key, *_ in CASES}
    seen = {(key, field) for key, _, _, field, _ in CASES}
    for key, fields in mapped.items():
        missing = [name for name in fields if not any(k == key and f.startswith(name) for k, f in seen)]
        assert missing == [], key


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3].rpartition('.')[2]}")
def test_a_key_changes_its_field(case: Case) -> None:
    key, override, around, field, expected = case
    without = [one for one in around if one.split("=")[0].lstrip("+") != key]
    before, after = read(*without), read(*around, override)
    if key not in ("trainer.resume_from_path", "data.custom_cls.name"):  # which what is around them cannot do without
        assert not before.problems
    assert not after.problems
    found = value(after.config, field)
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)
    assert type(found) is type(expected)
    if (key, before.config.policy.engine) != (
        "model.strategy",
        "fsdp",
    ):  # both of verl's strategies are the engine fsdp
        assert value(before.config, field) != found


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.chat_template=x", "data.chat_template is refused: verl stops at any value, too"),
        ("data.prompt_key=[a,b]", "data.prompt_key names 2 columns, and a prompt is in one"),
        ("model.fsdp_config.model_dtype=fp16", "model_dtype=fp16 needs loss scaling"),
        ("trainer.save_freq=0", "trainer.save_freq is 0, at which verl stops"),
        ("trainer.test_freq=0", "trainer.test_freq is 0, at which verl stops"),
        ("ulysses_sequence_parallel_size=2", "1 devices do not split into groups of 2 that share a sequence"),
        ("optim.lr_scheduler=linear", "optim.lr_scheduler must be one of cosine, wsd, not 'linear'"),
        ("data.truncation=middle", "data.truncation must be one of error, left, right, not 'middle'"),
        ("+optim.warmup_ratio=0.1", "there is no key optim.warmup_ratio in verl 0.4"),
        (
            "data.train_batch_sice=8",
            "there is no key data.train_batch_sice in verl 0.4, .*did you mean data.train_batch_size",
        ),
        ("model.lora_rank=-1", "model.lora_rank is -1"),
        ("+trainer.resume_mode=resume_path", "trainer.resume_from_path names no checkpoint"),
        ("optim.lr=0", "lr must be above 0, not 0"),
        ("+optim.lrs=1e-5", "there is no key optim.lrs in verl 0.4, .*did you mean optim.lr"),
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
    assert told["data.micro_batch_size"] == "verl does not read it, either"
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
    with pytest.raises(ConfigError, match=r"skyrl has no configuration for posttrain sft"):
        read_config(None, [], "skyrl", entry=SFT)
