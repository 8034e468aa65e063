"""ROLL's SFT pipeline: each key and the field it decides, sizes by hand, and what cannot be."""

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
ARGS, MODEL, DATA, CONFIG = (
    f"{S}.training_args",
    f"{S}.model_args",
    f"{S}.data_args",
    f"{S}.strategy_args.strategy_config",
)
BASE = ("pretrain=m", "sequence_length=512", f"{DATA}.file_name=a.jsonl")
TWO = (f"{S}.device_mapping=[0,1]",)
MEGATRON = (*TWO, f"{S}.strategy_args.strategy_name=megatron_train")
LORA = (f"{MODEL}.lora_target=all",)
VAL = ("validation.data_args.file_name=v.jsonl",)
DYNAMIC = (f"{S}.use_dynamic_batching_in_train=true",)

# what is written, one of our fields and its value then, what else is written
CASES: list[tuple[str, str, Any, tuple[str, ...]]] = [
    ("exp_name=mine", "run.name", "mine", ()),
    ("seed=7", "run.seed", 7, ()),
    ("output_dir=out", "run.folder", "out/start_sft_pipeline", ()),
    ("track_with=wandb", "tracking.trackers", ["console", "wandb"], ()),
    ("tracker_kwargs.project=p", "tracking.project", "p", ()),
    ("save_steps=5", "checkpoint.every_steps", 5, ()),
    ("max_ckpt_to_keep=3", "checkpoint.keep_last", 3, ()),
    ("resume_from_checkpoint=true", "run.resume", "auto", ()),
    ("checkpoint_config.output_dir=ck", "checkpoint.folder", "ck", ()),
    ("profiler_timeline=true", "profiling.steps", [1, 2, 3], ()),
    ("profiler_memory=true", "profiling.memory", True, ()),
    ("profiler_output_dir=p", "profiling.folder", "p", ("profiler_timeline=true",)),
    ("rpc_timeout=60", "placement.call_timeout_s", 60, ()),
    ("num_gpus_per_node=1", "placement.nodes", 2, TWO),
    ("pretrain=other", "model.path", "other", ()),
    ("sequence_length=100", "data.max_tokens", 100, ()),
    ("max_steps=20", "run.total_steps", 20, ()),
    ("eval_steps=5", "validation.every_steps", 5, VAL),
    ("max_grad_norm=0.5", "policy.optimizer.max_grad_norm", 0.5, ()),
    ("global_template=qwen3", "data.chat_template_options", {"enable_thinking": True}, ()),
    ("prompt_key=question", "data.prompt_column", "question", ()),
    ("response_key=answer", "data.response_column", "answer", ()),
    ("validation.data_args.file_name=v.jsonl", "data.validation_files", ["v.jsonl"], ()),
    (f"{ARGS}.learning_rate=1e-6", "policy.optimizer.lr", 1e-6, ()),
    (f"{ARGS}.weight_decay=0.1", "policy.optimizer.weight_decay", 0.1, ()),
    (f"{ARGS}.adam_beta1=0.8", "policy.optimizer.betas", (0.8, 0.999), ()),
    (f"{ARGS}.adam_beta2=0.95", "policy.optimizer.betas", (0.9, 0.95), ()),
    (f"{ARGS}.lr_scheduler_type=constant", "policy.schedule.name", "constant", ()),
    (f"{ARGS}.warmup_steps=5", "policy.schedule.warmup_updates", 5, ()),
    (f"{ARGS}.warmup_ratio=0.2", "policy.schedule.warmup_ratio", 0.2, ()),
    (f"{ARGS}.warmup_ratio=0.2", "policy.schedule.warmup_rounding", "up", ()),
    (f"{ARGS}.per_device_train_batch_size=2", "policy.sequences_per_micro_batch_per_device", 2, ()),
    (f"{ARGS}.per_device_train_batch_size=2", "data.sequences_per_step", 2, ()),
    # 4 per micro-batch x 3 x 2 devices = 24
    (f"{ARGS}.gradient_accumulation_steps=3", "data.sequences_per_step", 24, (*TWO, f"{ARGS}.per_device_train_batch_size=4")),
    (f"{ARGS}.num_train_epochs=3", "run.total_epochs", 3, ()),
    (f"{S}.use_dynamic_batching_in_train=true", "policy.max_tokens_per_micro_batch", 9,
     (f"{S}.max_tokens_per_microbatch_in_train=9",)),
    (f"{S}.max_tokens_per_microbatch_in_train=800", "policy.max_tokens_per_micro_batch", 800, DYNAMIC),
    (f"{S}.device_mapping=[0,1]", "placement.devices", 2, ()),
    (f"{S}.strategy_args.strategy_name=deepspeed_train", "policy.engine", "deepspeed", TWO),
    (f"{CONFIG}.tensor_model_parallel_size=2", "policy.tensor_parallel", 2, MEGATRON),
    (f"{CONFIG}.pipeline_model_parallel_size=2", "policy.pipeline_parallel", 2, MEGATRON),
    (f"{CONFIG}.context_parallel_size=2", "policy.sequence_parallel", 2, MEGATRON),
    (f"{CONFIG}.recompute_granularity=full", "model.gradient_checkpointing", True, MEGATRON),
    (f"{CONFIG}.save_only_model=true", "checkpoint.save_optimizer", False, ()),
    (f"{CONFIG}.async_save_ckpt=false", "checkpoint.background", False, ()),
    (f"{MODEL}.ulysses_size=2", "policy.sequence_parallel", 2, TWO),
    (f"{MODEL}.dtype=fp32", "model.compute_dtype", "float32", ()),
    (f"{MODEL}.disable_gradient_checkpointing=true", "model.gradient_checkpointing", False, ()),
    (f"{MODEL}.model_config_kwargs={{rope_theta: 5}}", "model.config_overrides", {"rope_theta": 5}, ()),
    (f"{MODEL}.freeze_module_prefix=vision_model", "model.freeze_vision", True, ()),
    (f"{MODEL}.lora_target=q_proj", "policy.lora.target_modules", ["q_proj"], LORA),
    (f"{MODEL}.lora_target=all-linear", "policy.lora.target_modules", "all-linear", (f"{MODEL}.lora_target=q_proj",)),
    (f"{MODEL}.lora_rank=4", "policy.lora.rank", 4, LORA),
    (f"{MODEL}.lora_alpha=5", "policy.lora.alpha", 5.0, LORA),
    (f"{MODEL}.lora_dropout=0.1", "policy.lora.dropout", 0.1, LORA),
    (f"{MODEL}.adapter_name_or_path=a", "policy.lora.adapter_path", "a", LORA),
    (f"{DATA}.template=qwen3", "data.chat_template_options", {"enable_thinking": True}, ()),
    (f"{DATA}.file_name=[b.jsonl]", "data.train_files", ["b.jsonl"], ()),
    (f"{DATA}.preprocessing_num_workers=4", "data.tokenize_workers", 4, ()),
]  # fmt: skip


@cache
def read(*overrides: str) -> LoadedConfig[SftConfig]:
    return read_dialect(DIALECT, None, (*BASE, *overrides), entry=SFT)


def at(config: SftConfig, field: str) -> Any:
    node: Any = config
    for part in field.split("."):
        node = getattr(node, part)
    return node


@pytest.mark.parametrize(("override", "field", "value", "given"), CASES, ids=lambda value: str(value)[:50])
def test_a_key_decides_its_field(override: str, field: str, value: Any, given: tuple[str, ...]) -> None:
    without, with_it = read(*given), read(*given, override)
    assert with_it.problems == ()
    assert at(with_it.config, field) == value
    if not override.startswith(f"{MODEL}.lora_target") and without.problems == ():
        assert at(without.config, field) != value
    row = DIALECT.ledger.of("sft").by_name[override.split("=")[0]]
    assert any(f"{field}.".startswith(f"{one}.") or f"{one}.".startswith(f"{field}.") for one in row.fields)


def test_every_mapped_key_is_tested() -> None:
    """But the options of engines, which go the way of actor_train's: one of them stands for all."""
    mapped = {row.name for row in DIALECT.ledger.of("sft").rows if row.status == "mapped"}
    options = {name for name in mapped if name.startswith(f"{CONFIG}.")}
    tested = {override.split("=")[0] for override, *_ in CASES}
    assert mapped - options <= tested <= mapped
    handed_on = read(*MEGATRON, f"{CONFIG}.recompute_num_layers=2").config.policy.engine_options
    assert handed_on == {"recompute_num_layers": 2}


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
        ((f"{MODEL}.dtype=fp16",), f"{MODEL}.dtype", "use bf16, which needs no loss scale, or fp32"),
        (DYNAMIC, f"{S}.max_tokens_per_microbatch_in_train",
         f"use {S}.max_tokens_per_microbatch_in_train=512 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_gets_one_message(overrides: tuple[str, ...], key: str, fix: str) -> None:
    [problem] = read(*overrides).problems
    assert (problem.field, problem.fix) == (key, fix)


@pytest.mark.parametrize(
    "override", ["query_key=input", "system_key=system", f"{MODEL}.additional_target=embed_tokens"]
)
def test_what_is_planned_can_be_planned_for(override: str) -> None:
    loaded = read(override)
    assert loaded.problems == ()
    assert [problem.field for problem in loaded.unsupported] == [override.split("=")[0]]


def test_what_has_no_effect_is_told() -> None:
    written = ("eval_steps=5", f"{S}.infer_batch_size=4", f"{MODEL}.model_name_or_path=x", "logging_steps=3")
    assert [one.key for one in read(*written).ignored] == [text.split("=")[0] for text in written]
    [warning] = [text for text in read("rollout_batch_size=8").warnings if "rollout_batch_size" in text]
    assert "roll ignores such keys" in warning
