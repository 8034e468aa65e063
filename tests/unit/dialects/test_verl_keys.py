"""verl's keys: all of them have a row, with the defaults that verl shipped; its page's blocks load; misspellings are seen."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.dialects.detect import read_config
from posttrain.dialects.ledger import ABSENT, Key, Ledger, leaves
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.value_types import fits
from posttrain.dialects.verl import DIALECT

DOCUMENTS = Path(__file__).parent / "verl_documents"
LEDGER = DIALECT.ledger
TRAIN = LEDGER.of("train")


def documented() -> Iterator[str]:
    """The keys of keys.txt."""
    sections: tuple[str, ...] = ()
    for line in (DOCUMENTS / "keys.txt").read_text().splitlines():
        if line.startswith("["):
            sections = tuple("" if name == "top" else f"{name}." for name in line.strip("[]").split())
        elif not line.startswith("#"):
            yield from (section + key for section in sections for key in line.split())


def written(name: str) -> dict[str, Any]:
    """Keys and values of a block of verl's page."""
    return dict(leaves(yaml.safe_load((DOCUMENTS / f"{name}.yaml").read_text())))


def row(key: str, ledger: Ledger = TRAIN) -> Key:
    found = ledger.find(key)
    assert found is not None, key
    return found


def test_every_documented_key_has_a_row() -> None:
    keys = list(documented())
    assert [key for key in keys if TRAIN.find(key) is None] == []
    assert len(keys) == len(set(keys)) > 350


@pytest.mark.parametrize("name", ["ppo_trainer_0.2", "ppo_trainer_0.4", "ppo_trainer_0.4_zh"])
def test_every_key_of_the_page_has_a_row(name: str) -> None:
    version = name.split("_")[2]
    keys = [key for key, value in leaves(yaml.safe_load((DOCUMENTS / f"{name}.yaml").read_text())) if value != {}]
    assert len(keys) > 90
    assert [key for key in keys if TRAIN.at(version).find(key) is None] == []


@pytest.mark.parametrize(
    ("name", "entry"), [("sft_trainer_0.4", "sft"), ("sft_trainer_0.4_zh", "sft"), ("evaluation_0.4", "evaluate")]
)
def test_the_blocks_of_other_entry_points_have_rows_of_their_types(name: str, entry: str) -> None:
    ledger = LEDGER.of(entry)
    for key, value in written(name).items():
        found = row(key, ledger)
        assert found.status in ("mapped", "ignored", "planned")
        assert fits(float(value) if value == "1e-5" else value, found.type)  # OmegaConf reads 1e-5 as a number


@pytest.mark.parametrize(
    ("version", "name"), [("0.2", "ppo_trainer_0.2"), ("", "ppo_trainer_0.4"), ("", "ppo_trainer_0.4_zh")]
)
def test_the_page_as_it_stands_loads(version: str, name: str) -> None:
    loaded = read_dialect(DIALECT, str(DOCUMENTS / f"{name}.yaml"), [], version=version)
    assert loaded.problems == ()
    config = loaded.config
    assert config.data.prompts_per_step == 1024
    assert config.policy.sequences_per_mini_batch == 256  # n = 1
    assert config.policy.sequences_per_micro_batch_per_device == 8
    assert config.reference.sequences_per_micro_batch_per_device == 16
    assert config.validation.every_steps == 2
    assert config.placement.devices == 8
    assert config.rollout.engine == "vllm"
    asked = " ".join(problem.what for problem in loaded.unsupported)
    assert config.checkpoint.upload is not None and "experiments/gsm8k/ppo/" in config.checkpoint.upload
    assert "vllm" in asked
    if version == "0.2":  # the KL is in the reward, with the 0.005 that the page shows
        assert (config.reward.kl.coef, config.loss.entropy_coef, config.loss.dual_clip) == (0.005, 0.001, None)
        assert config.data.overlong_prompts == "filter"
    else:
        assert (config.reward.kl.coef, config.loss.entropy_coef, config.loss.dual_clip) == (0.0, 0.0, 3.0)
        assert config.data.overlong_prompts == "error"


@pytest.mark.parametrize(("name", "style"), [("megatron_optim_0.4", "linear"), ("megatron_optim_0.4_zh", "constant")])
def test_the_megatron_block_loads_in_its_place(tmp_path: Path, name: str, style: str) -> None:
    optim = yaml.safe_load((DOCUMENTS / f"{name}.yaml").read_text())["optim"]
    optim["lr"] = float(optim["lr"])  # this YAML library reads 1e-6 as a text, and would write it with quotes
    actor = {"strategy": "megatron", "optim": optim, "ppo_micro_batch_size_per_gpu": 8}
    file = tmp_path / "run.yaml"
    tree = {"actor_rollout_ref": {"actor": actor, "rollout": {"log_prob_micro_batch_size_per_gpu": 8}}}
    file.write_text(yaml.safe_dump(tree))
    loaded = read_dialect(DIALECT, str(file), [])
    assert loaded.problems == ()
    assert loaded.config.policy.schedule.name == style
    assert loaded.config.policy.engine == "megatron"
    assert loaded.config.policy.optimizer.max_grad_norm == 1.0


def test_what_the_translated_page_made_up_is_answered_with_the_real_keys() -> None:
    loaded = read_dialect(DIALECT, str(DOCUMENTS / "made_up_0.4_zh.yaml"), [])
    told = {problem.field: str(problem) for problem in loaded.problems}
    for made_up in ("evaluation.dataset", "evaluation.metrics", "evaluation.frequency"):
        assert (
            "data.path, data.prompt_key, data.response_key, data.data_source_key, data.reward_model_key"
            in told[made_up]
        )
    for translated, real in (
        ("数据.路径", "data.path"),
        ("数据.提示键", "data.prompt_key"),
        ("数据.响应键", "data.response_key"),
        ("数据.数据源键", "data.data_source_key"),
        ("数据.奖励模型键", "data.reward_model_key"),
        ("自定义奖励函数.名称", "custom_reward_function.name"),
        ("优化器配置.学习率", "optim.lr"),
        ("优化器配置.权重衰减", "optim.weight_decay"),
        ("优化器配置.热身步数比例", "optim.warmup_steps_ratio"),
        ("优化器配置.梯度裁剪", "optim.clip_grad"),
        ("优化器配置.学习率调度器", "optim.lr_scheduler"),
    ):
        assert told[translated].count(f"the key is {real}, at ") == 1


# What verl 0.4 and 0.2 shipped, key by key, wherever its page says something else or the two differ.
@pytest.mark.parametrize(
    ("key", "latest", "first"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", None, None),  # page: 8
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", None, None),  # page: 16
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", None, None),  # page: 16
        ("critic.ppo_micro_batch_size_per_gpu", None, None),
        ("reward_model.micro_batch_size_per_gpu", None, None),  # page: 16
        ("algorithm.kl_ctrl.kl_coef", 0.001, 0.001),  # page: 0.005
        ("trainer.test_freq", -1, -1),  # page: 2
        ("trainer.save_freq", -1, -1),
        ("trainer.default_hdfs_dir", None, None),  # page: a path
        ("actor_rollout_ref.model.enable_gradient_checkpointing", True, True),  # page: False
        ("critic.model.enable_gradient_checkpointing", True, True),
        ("data.trust_remote_code", False, ABSENT),  # page: True
        ("actor_rollout_ref.model.override_config", {}, {}),  # page: nested
        ("actor_rollout_ref.actor.entropy_coeff", 0.0, 0.001),
        ("actor_rollout_ref.actor.optim.min_lr_ratio", 0.0, None),
        ("actor_rollout_ref.actor.optim.lr_decay_style", "constant", ABSENT),  # English page: linear
        ("actor_rollout_ref.actor.fsdp_config.grad_offload", ABSENT, False),
        ("actor_rollout_ref.actor.clip_ratio_c", 3.0, ABSENT),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 16384, 16384),
        ("critic.ppo_max_token_len_per_gpu", 32768, 32768),
        ("critic.optim.lr", 1e-5, 1e-5),
        ("critic.cliprange_value", 0.5, 0.5),
        ("data.val_batch_size", None, 1312),
        ("data.train_batch_size", 1024, 1024),
        ("data.filter_overlong_prompts", False, ABSENT),
        ("algorithm.use_kl_in_reward", False, ABSENT),
        ("algorithm.adv_estimator", "gae", "gae"),
        ("actor_rollout_ref.rollout.name", "vllm", "vllm"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 2, 2),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", 0, ABSENT),
        ("trainer.resume_from_path", None, False),
        ("trainer.val_generations_to_log_to_wandb", ABSENT, 0),
        ("trainer.remove_previous_ckpt_in_save", ABSENT, False),
        ("trainer.logger", ["console", "wandb"], ["console", "wandb"]),
        ("trainer.total_epochs", 30, 30),
        ("trainer.n_gpus_per_node", 8, 8),
    ],
)
def test_defaults_are_the_shipped_ones(key: str, latest: Any, first: Any) -> None:
    assert row(key).default == latest
    old = TRAIN.at("0.2").find(key)
    assert (ABSENT if old is None else old.default) == first


@pytest.mark.parametrize("version", ["0.2", "0.4"])
def test_only_these_defaults_of_the_page_are_not_the_shipped_ones(version: str) -> None:
    """Every other value that the page shows is the default of its row."""
    defaults = TRAIN.at(version)
    differing = set()
    for key, shown in written(f"ppo_trainer_{version}").items():
        default = row(key, defaults).default
        same = float(shown) == default if isinstance(shown, str) and shown == "1e-6" else shown == default
        if not same and default is not ABSENT:
            differing.add(key)
    assert differing == {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "reward_model.micro_batch_size_per_gpu",
        "reward_model.model.path",
        "algorithm.kl_ctrl.kl_coef",
        "trainer.test_freq",
        "trainer.default_hdfs_dir",
    } | ({"data.trust_remote_code"} if version == "0.4" else set())


def test_defaults_of_the_other_entry_points() -> None:
    sft, old = LEDGER.of("sft"), LEDGER.at("0.2").of("sft")
    assert row("model.enable_gradient_checkpointing", sft).default is True
    assert row("model.enable_gradient_checkpointing", old).default is False
    assert row("optim.lr", sft).default == 1e-5
    assert row("optim.betas", sft).default == [0.9, 0.95]
    assert row("rollout.top_k", LEDGER.of("generate")).default == 50
    assert row("custom_reward_function.name", LEDGER.of("evaluate")).default == "compute_score"


def test_verls_defaults_lack_nothing_but_the_sizes_that_verl_asks_for() -> None:
    loaded = read_dialect(DIALECT, None, ["data.train_files=a.parquet", "data.val_files=b.parquet"])
    assert sorted(problem.field for problem in loaded.problems) == [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
    ]
    given = [f"{problem.fix.split(',')[0].removeprefix('use ')}" for problem in loaded.problems]
    assert read_dialect(DIALECT, None, given).problems == ()


def test_defaults_lists_start_from_verls_files(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    sizes = "{actor: {ppo_micro_batch_size_per_gpu: 8}, rollout: {log_prob_micro_batch_size_per_gpu: 8}}"
    for name, engine, recompute in (("ppo_trainer", "fsdp", True), ("ppo_megatron_trainer", "megatron", False)):
        file.write_text(f"defaults: [{name}, _self_]\nactor_rollout_ref: {sizes}\n")
        loaded = read_dialect(DIALECT, str(file), [])
        assert loaded.problems == ()
        assert loaded.config.policy.engine == loaded.config.critic.engine == engine
        assert loaded.config.model.gradient_checkpointing is loaded.config.critic.gradient_checkpointing is recompute


def _misspelled(key: str, random_: random.Random, *, anywhere: bool) -> str:
    """One character deleted, inserted, replaced, or swapped with the next."""
    start = 0 if anywhere else key.rfind(".") + 1
    place = random_.randrange(start, len(key))
    letter = random_.choice(string.ascii_lowercase + "_")
    return random_.choice(
        [
            key[:place] + key[place + 1 :],
            key[:place] + letter + key[place:],
            key[:place] + letter + key[place + 1 :],
            key[:place] + key[place + 1 : place + 2] + key[place] + key[place + 2 :],
        ]
    )


def test_misspellings_get_the_right_suggestion() -> None:
    random_ = random.Random(20250705)
    names = [row.name for row in TRAIN.rows if "*" not in row.name and row.name.isascii()]
    tried = right = 0
    while tried < 500:
        key = random_.choice(names)
        wrong = _misspelled(key, random_, anywhere=tried % 2 == 0)
        if wrong == key or TRAIN.find(wrong) is not None or TRAIN.is_section(wrong):
            continue
        tried += 1
        right += TRAIN.nearest(wrong) == [key]
    assert right >= 475


def test_an_ascend_device_becomes_the_accelerator_at_hand_with_a_warning() -> None:
    loaded = read_config(None, ["trainer.device=npu"], "verl")
    assert loaded.config.placement.device == "auto"
    assert any("Ascend devices are not supported" in text for text in loaded.warnings)
    assert read_config(None, ["trainer.device=cuda"], "verl").config.placement.device == "cuda"
