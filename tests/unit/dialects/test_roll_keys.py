"""ROLL's keys: all of them have a row, with the defaults that ROLL shipped; its guide's blocks load; misspellings are seen."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.dialects.ledger import ABSENT, leaves
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.roll import DIALECT

DOCUMENTS = Path(__file__).parent / "roll_documents"
WORKERS = (
    "actor_train", "actor_infer", "critic", "reference", "validation", "train_env_manager", "val_env_manager",
    "reward_model", "rewards.math",
)  # fmt: skip
LEDGER = DIALECT.ledger.of("train")
# What the guide leaves to other pages: the model and the rewards.
ELSEWHERE = (
    "pretrain: m\n"
    "rewards: {math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}\n"
)


def documented() -> Iterator[str]:
    """The keys of keys.txt."""
    sections: tuple[str, ...] = ()
    for line in (DOCUMENTS / "keys.txt").read_text().splitlines():
        if line.startswith("["):
            names = line.strip("[]").split()
            sections = ("",) if names == ["top"] else WORKERS if names == ["worker"] else tuple(names)
        elif not line.startswith("#"):
            yield from (f"{section}.{key}".lstrip(".") for section in sections for key in line.split())


def block(name: str) -> str:
    """A block of the guide, without the lines that only say that there is more."""
    lines = (DOCUMENTS / f"{name}.yaml").read_text().splitlines()
    return "\n".join(line for line in lines if line.strip() != "...") + "\n"


def row_of(key: str) -> Any:
    """A key's own row, or that of a section whose names the user chooses."""
    parts = key.split(".")
    found = (LEDGER.find(".".join(parts[:end])) for end in range(len(parts), 0, -1))
    return next((row for row in found if row is not None), None)


def test_every_documented_key_has_a_row() -> None:
    others = [DIALECT.ledger.of(entry) for entry in ("sft", "tune")]
    unknown = [key for key in documented() if row_of(key) is None and not LEDGER.is_section(key)]
    assert [key for key in unknown if all(each.find(key) is None and not each.is_section(key) for each in others)] == []
    assert len(set(documented())) > 900


def test_every_key_of_the_guide_has_a_row() -> None:
    for name in ("pipeline", "workers", "deepspeed"):
        keys = [key for key, _ in leaves(yaml.safe_load(block(name))) if key.split(".")[0] != "defaults"]
        assert keys
        assert [key for key in keys if row_of(key) is None and not LEDGER.is_section(key)] == []


@pytest.mark.parametrize(
    ("key", "latest", "first"),
    [
        ("rollout_batch_size", 128, 128),
        ("num_return_sequences_in_group", 1, 1),
        ("prompt_length", 1024, 1024),
        ("response_length", None, None),
        ("adv_estimator", "gae", "gae"),
        ("lambd", 0.95, 0.95),
        ("pg_clip", 0.2, 0.2),
        ("value_clip", None, None),
        ("init_kl_coef", 0.2, 0.2),
        ("kl_horizon", 10000, 10000),
        ("kl_penalty", "kl", "kl"),
        ("max_steps", 500, 500),
        ("save_steps", 50, 50),
        ("eval_steps", 10, 10),
        ("seed", 42, 42),
        ("track_with", "tensorboard", "tensorboard"),
        ("resume_from_checkpoint", False, False),
        ("num_gpus_per_node", 8, 8),
        ("max_running_requests", 128, 128),
        ("max_additional_running_prompts", 16, 16),
        ("loss_agg_mode", "seq-mean-token-mean", "token-mean"),
        ("reward_normalization.grouping", "batch", "state"),
        ("actor_train.training_args.warmup_ratio", 0.0, 0.03),
        ("actor_train.training_args.learning_rate", 5e-5, 5e-5),
        ("actor_train.training_args.per_device_train_batch_size", 8, 8),
        ("actor_train.training_args.lr_scheduler_type", "linear", "linear"),
        ("actor_train.training_args.weight_decay", 0.0, 0.0),
        ("actor_train.strategy_args.strategy_name", "fsdp2_train", "deepspeed_train"),
        ("actor_train.infer_batch_size", 16, 16),
        ("actor_train.model_args.dtype", "bf16", "bf16"),
        ("actor_infer.generating_args.temperature", 0.95, 0.95),
        ("actor_infer.generating_args.top_p", 0.7, 0.7),
        ("actor_infer.generating_args.top_k", 50, 50),
        ("actor_infer.generating_args.max_new_tokens", 8192, 512),
        ("actor_infer.generating_args.max_length", 8192, 512),
        ("norm_mean_type", None, ABSENT),  # there is no such key yet
        ("importance_sampling", "token", ABSENT),
        ("reward_norm", None, None),
    ],
)
def test_defaults_are_those_that_roll_shipped(key: str, latest: Any, first: Any) -> None:
    row = LEDGER.by_name[key]
    came_later = row.since == "2026-08"
    assert (row.default, ABSENT if came_later else row.earlier.get("2025-05", row.default)) == (latest, first)


@pytest.fixture
def load(tmp_path: Path):
    def read(text: str, *overrides: str) -> LoadedConfig:
        file = tmp_path / "examples" / "run.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return read_dialect(DIALECT, str(file), overrides)

    return read


def test_the_guides_blocks_load_as_they_stand(load) -> None:
    loaded = load(ELSEWHERE + block("pipeline") + block("workers"), "adv_estimator=grpo")
    assert [str(problem) for problem in loaded.problems] == []
    assert not [warning for warning in loaded.warnings if "there is no key" in warning]
    config = loaded.config
    # 64 prompts x 8 samples = 512 sequences; an update is 1 x 32 x 16 devices = 512 of them
    assert config.data.prompts_per_step * config.rollout.samples_per_prompt == 512
    assert config.policy.sequences_per_mini_batch == 512
    assert config.data.train_files == ["xxx/train.json"] and config.data.prompt_column == "instruction"
    assert (config.policy.engine, config.rollout.engine, config.placement.devices) == ("megatron", "vllm", 16)
    assert config.rollout.engine_options == {"gpu_memory_utilization": 0.6, "block_size": 16, "max_model_len": 8000}
    assert (config.rollout.temperature, config.rollout.max_response_tokens) == (0.99, 4096)
    assert config.policy.schedule.warmup_updates == 20


def test_the_guides_deepspeed_block_finds_the_presets(load) -> None:
    text = ELSEWHERE + block("pipeline") + block("deepspeed")
    given = ("adv_estimator=grpo", "actor_train.data_args.file_name=a.json", "actor_train.device_mapping=[0,1]",
             "actor_infer.device_mapping=[0,1]")  # fmt: skip
    loaded = load(text, *given)
    assert [str(problem) for problem in loaded.problems] == []
    assert loaded.config.policy.engine == "deepspeed"
    zero = loaded.config.policy.engine_options["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"]) == (2, 500_000_000)
    cpu = load(text.replace("${deepspeed_zero2}", "${deepspeed_zero3_cpuoffload}"), *given).config.policy.engine_options
    assert (cpu["zero_optimization"]["stage"], cpu["zero_optimization"]["offload_optimizer"]["device"]) == (3, "cpu")


def test_unknown_keys_are_told_and_change_nothing(load) -> None:
    text = ELSEWHERE + "response_length: 9\nadv_estimator: reinforce\nactor_train: {data_args: {file_name: a.json}}\n"
    loaded = load(text + "positve_loss: 1\nrollout_batch_sise: 64\n")
    assert not loaded.problems and loaded.config == load(text).config
    said = [re.sub(r"at \S+run.yaml", "at run.yaml", warning) for warning in loaded.warnings]
    assert (
        "there is no key rollout_batch_sise in roll 2026-08, at run.yaml:7 rollout_batch_sise; roll ignores such keys, and so "
        "does this run (did you mean rollout_batch_size?)"
    ) in said


def test_what_hydra_and_nulls_ask_for_is_taken(load) -> None:
    text = ELSEWHERE + (
        "hydra: {run: {dir: .}, output_subdir: null}\ndefaults:\n  - ../config/traj_envs@_here_\n"
        "response_length: 9\nadv_estimator: reinforce\nreward_clip: ~\nadvantage_clip: ~\nrender_save_dir: ~\n"
        "reward_norm: None\nsystem_envs: {A: '1'}\nactor_train: {data_args: {file_name: a.json}, strategy_args: ~}\n"
    )
    loaded = load(text)
    assert not loaded.problems and not loaded.unsupported
    assert loaded.config.reward.clip is None and loaded.config.reward.normalize_mean == "none"


def test_misspellings_find_their_key() -> None:
    rng = random.Random(0)
    names = [row.name.replace("*", "math") for row in LEDGER.rows if not row.name.endswith("**")]
    wrong = []
    tried = 0
    while tried < 500:
        name = rng.choice(names)
        path, _, last = name.rpartition(".")
        key = f"{path}.{slip(last, rng)}".lstrip(".") if rng.random() < 0.5 else slip(name, rng)
        if key != name and LEDGER.find(key) is None:
            tried += 1
            if LEDGER.nearest(key) != [name]:
                wrong.append((key, name))
    assert len(wrong) <= 25, wrong


def slip(word: str, rng: random.Random) -> str:
    """One letter left out, added, replaced, or swapped with the next."""
    place, letter = rng.randrange(len(word)), rng.choice(string.ascii_lowercase + "_")
    match rng.randrange(4):
        case 0:
            return word[:place] + word[place + 1 :]
        case 1:
            return word[:place] + letter + word[place:]
        case 2:
            return word[:place] + letter + word[place + 1 :]
    return word[:place] + word[place : place + 2][::-1] + word[place + 2 :]


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_no_mapped_key_of_strategy_config_is_one_that_its_engine_ignores(role: str) -> None:
    """A key whose option has no effect has a row that says so; mapped means that something happens."""
    from posttrain.dialects.roll.ledger import LEDGER
    from posttrain.plan.engines.deepspeed import DeepspeedOptions
    from posttrain.plan.engines.fsdp import FsdpOptions
    from posttrain.plan.engines.megatron.options import MegatronOptions

    engines = {"megatron": MegatronOptions, "fsdp2": FsdpOptions, "deepspeed": DeepspeedOptions}
    looked_at = 0
    for row in LEDGER.rows:
        for field in row.fields:
            name = field.removeprefix(f"{role}.engine_options.").split(".")[0]
            option = engines[row.engine].model_fields.get(name) if row.engine in engines else None
            if option is not None and field.startswith(f"{role}.engine_options."):
                looked_at += 1
                assert "ignored" not in (option.json_schema_extra or {}), row.name
    assert looked_at > 20
