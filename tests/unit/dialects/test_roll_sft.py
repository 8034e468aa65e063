"""ROLL's SFT pipeline: a whole file, sizes by hand, and what cannot be; single keys are tested by the examples of their rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from posttrain.config import SftConfig
from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import SFT
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.roll import DIALECT
from posttrain.errors import ConfigError

S = "sft_train"
ARGS, MODEL, DATA = f"{S}.training_args", f"{S}.model_args", f"{S}.data_args"
BASE = ("pretrain=m", "sequence_length=512", f"{DATA}.file_name=a.jsonl")
DYNAMIC = (f"{S}.use_dynamic_batching_in_train=true",)


@cache
def read(*overrides: str) -> LoadedConfig[SftConfig]:
    return read_dialect(DIALECT, None, (*BASE, *overrides), entry=SFT)


def test_a_file_of_roll_s_is_an_sft_configuration(tmp_path: Any) -> None:
    """8 micro-batches' sequences x 32 x (8 devices / tensor 2 / pipeline 2) = 512 of a step."""
    file = tmp_path / "sft_config.yaml"
    file.write_text(
        """\
exp_name: qwen-sft
pretrain: Qwen/Qwen2.5-7B
sequence_length: 4096
save_steps: 500
eval_steps: 100
prompt_key: instruction
query_key: null
response_key: output
sft_train:
  model_args: {dtype: bf16, attn_implementation: fa2}
  training_args:
    num_train_epochs: 2
    learning_rate: 2.0e-5
    per_device_train_batch_size: 8
    gradient_accumulation_steps: 32
  data_args: {file_name: [a.jsonl], template: qwen2_5, preprocessing_num_workers: 4}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}
  device_mapping: list(range(0,8))
  infer_batch_size: 8
validation:
  data_args: {file_name: v.jsonl}
"""
    )
    loaded = read_config(str(file), [], None)
    assert (loaded.dialect, loaded.entry, loaded.problems) == ("roll", "sft", ())
    config = loaded.config
    assert config.data.sequences_per_step == 512
    assert (config.run.total_epochs, config.run.total_steps, config.data.shuffle) == (2, None, False)
    assert (config.validation.before_training, config.validation.after_training) == (True, False)
    with pytest.raises(ConfigError, match="this is an SFT configuration: posttrain sft"):
        from posttrain.dialects.entries import TRAIN

        read_config(str(file), [], None, entry=TRAIN)


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (("pretrain=null",), "pretrain", "use pretrain=FOLDER, or a hub id"),
        (("sequence_length=null",), "sequence_length", "use sequence_length=2048"),
        ((f"{DATA}.file_name=null",), f"{DATA}.file_name", f"use {DATA}.file_name=FILE.jsonl"),
        ((f"{ARGS}.num_train_epochs=1.5",), f"{ARGS}.num_train_epochs", f"use {ARGS}.num_train_epochs=2"),
        ((f"{S}.device_mapping=[2,3]",), f"{S}.device_mapping", f"use {S}.device_mapping='list(range(0,2))'"),
        (DYNAMIC, f"{S}.max_tokens_per_microbatch_in_train",
         f"use {S}.max_tokens_per_microbatch_in_train=512 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_gets_one_message(overrides: tuple[str, ...], key: str, fix: str) -> None:
    [problem] = read(*overrides).problems
    assert (problem.field, problem.fix) == (key, fix)


def test_modules_trained_in_full_beside_an_adapter_are_refused() -> None:
    [problem] = read(f"{MODEL}.additional_target=embed_tokens").problems
    assert problem.field == f"{MODEL}.additional_target" and "named in lora_target they get an adapter" in str(problem)


def test_fp16_trains_in_bf16_and_says_so() -> None:
    loaded = read(f"{MODEL}.dtype=fp16")
    assert loaded.problems == () and loaded.config.model.compute_dtype == "bfloat16"
    assert any(f"{MODEL}.dtype=fp16: trains in bf16" in warning for warning in loaded.warnings)


def test_what_has_no_effect_is_told() -> None:
    written = ("eval_steps=5", f"{S}.infer_batch_size=4", f"{MODEL}.model_name_or_path=x", "logging_steps=3")
    assert [one.key for one in read(*written).ignored] == [text.split("=")[0] for text in written]
    [warning] = [text for text in read("rollout_batch_size=8").warnings if "rollout_batch_size" in text]
    assert "roll ignores such keys" in warning
