"""ROLL's DPO pipeline: a file of ROLL's, as it stands in its examples, and what becomes of its sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import TRAIN
from posttrain.errors import ConfigError

FILE = """
exp_name: qwen-dpo
max_steps: 500
sequence_length: 512
num_gpus_per_node: 8
pretrain: Qwen/Qwen2.5-3B-Instruct
ipo: false
beta: 0.3
label_smoothing: 0.1
chosen_key: chosen
rejected_key: rejected
global_template: qwen2_5
validation: {data_args: {file_name: held_out.json}}
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 16, gradient_accumulation_steps: 2}
  data_args: {file_name: [train.json]}
  strategy_args: {strategy_name: megatron_train, strategy_config: {recompute_granularity: full}}
  device_mapping: list(range(0,8))
reference:
  strategy_args: {strategy_name: megatron_infer}
  device_mapping: list(range(0,8))
  infer_batch_size: 8
"""


def read(tmp_path: Path, *overrides: str, text: str = FILE, **how: Any) -> Any:
    file = tmp_path / "dpo_config.yaml"
    file.write_text(text)
    return read_config(str(file), overrides, None, skip_files=True, **how)


def test_a_file_of_roll_s_is_a_tuning_configuration(tmp_path: Path) -> None:
    loaded = read(tmp_path)
    assert (loaded.dialect, loaded.entry, loaded.problems) == ("roll", "tune", ())
    config = loaded.config
    assert config.method.name == "dpo"
    assert config.method.settings["beta"] == 0.3 and config.method.settings["label_smoothing"] == 0.1
    assert config.data.sequences_per_step == 2 * 16 * 2 * 8  # 256 pairs
    assert config.policy.sequences_per_micro_batch_per_device == 32
    assert config.reference.sequences_per_micro_batch_per_device == 16
    assert (config.data.prompt_column, config.data.overlong) == ("instruction", "filter")
    assert (config.policy.engine, config.placement.devices) == ("megatron", 8)
    assert (config.run.total_steps, config.data.shuffle) == (500, True)


def test_the_template_of_pairs_is_the_tokenizers_own(tmp_path: Path) -> None:
    plain, pairs = read(tmp_path), read(tmp_path, "global_template=qwen2_5_dpo")
    assert not pairs.problems and not pairs.unsupported
    assert pairs.config == plain.config


def test_ipo_is_a_loss_and_has_no_smoothing(tmp_path: Path) -> None:
    loaded = read(tmp_path, "ipo=true")
    assert loaded.config.method.settings["loss"] == "ipo"
    assert "label_smoothing" in [one.key for one in loaded.ignored]


def test_reference_on_devices_of_its_own(tmp_path: Path) -> None:
    config = read(tmp_path, "reference.device_mapping=[8,9]").config
    assert config.reference.devices == [8, 9]
    assert config.policy.devices == list(range(8))
    assert config.placement.devices == 10


def test_train_names_the_command_that_reads_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a tuning configuration: posttrain tune"):
        read(tmp_path, entry=TRAIN)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("sequence_length=null", "sequence_length"),
        ("actor_train.data_args.file_name=null", "actor_train.data_args.file_name"),
    ],
)
def test_what_is_missing_is_one_problem(tmp_path: Path, override: str, key: str) -> None:
    [problem] = read(tmp_path, override).problems
    assert problem.field == key


def test_a_file_of_2025_is_seen_by_its_columns_whatever_hydra_has_in_it(tmp_path: Path) -> None:
    of_2025 = "".join(line for line in FILE.splitlines(True) if not line.startswith(("ipo", "beta", "label")))
    of_2025 += "hydra: {run: {dir: .}, output_subdir: null}\n"
    assert read(tmp_path, text=of_2025).entry == "tune"


def test_a_diffusion_model_is_named_whichever_pipeline_its_keys_are_like(tmp_path: Path) -> None:
    diffusion = FILE.replace("megatron_train", "diffusion_deepspeed_train")
    with pytest.raises(ConfigError, match="reward feedback learning of a diffusion model"):
        read(tmp_path, text=diffusion)
