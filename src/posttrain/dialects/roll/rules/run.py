"""The run itself: model, data, lengths, cadence, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.dialects.metric_names import tracking
from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.look import CONFIG, count, plain, uses_critic, uses_reference

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
VISION_TOWERS = ("vision_model", "visual", "model.visual", "vision_tower", "model.vision_model")
_DATA = "actor_train.data_args"
_OTHER_TRACKERS = ("trackio", "ml_tracker")  # the second is in ROLL's examples and not in its program


def model(keys: Reader) -> dict[str, Any]:
    """Return the models and their precision."""
    policy_key = "actor_train.model_args.model_name_or_path"
    path = keys[policy_key] or keys["pretrain"]
    if path is None and keys["actor_infer.model_args.model_name_or_path"]:
        path = keys["actor_infer.model_args.model_name_or_path"]
    if path is None:
        keys.problem("no model is named", key="pretrain", fix="use pretrain=FOLDER, or a hub id")
    fields: dict[str, Any] = {"model.path": path} if path is not None else {}
    fields |= precision(keys, "actor_train") | frozen(keys, "actor_train")
    fields["model.gradient_checkpointing"] = recomputes(keys, "actor_train")
    if uses_reference(keys) and keys["actor_train.model_args.lora_target"]:
        without = "with lora_target the reference is the policy without its adapter, in ROLL too"
        keys.ignore("reference.model_args.model_name_or_path", without)
    elif uses_reference(keys):
        reference = keys["reference.model_args.model_name_or_path"] or keys["pretrain"]
        if reference != path and reference is not None:
            fields["reference.path"] = reference
    if uses_critic(keys):
        scorer = keys["critic.model_args.model_name_or_path"] or keys["reward_pretrain"]
        if scorer is not None and scorer != path:
            fields["critic.path"] = scorer
        fields["critic.gradient_checkpointing"] = recomputes(keys, "critic")
        fields |= frozen(keys, "critic", ours="critic")
    return fields


def precision(keys: Reader, section: str) -> dict[str, Any]:
    """Return the compute precision of a trained model."""
    key = f"{section}.model_args.dtype"
    dtype = keys[key]
    if dtype == "fp16":
        keys.warn(f"{key}=fp16: trains in bf16, which takes the same memory and needs no loss scale")
    elif dtype is None:
        keys.warn(f"{key} is null: bf16 is used, whatever the checkpoint holds")
    return {"model.compute_dtype": DTYPES.get(dtype, "bfloat16")}


def frozen(keys: Reader, section: str, *, ours: str = "model") -> dict[str, Any]:
    """Modules that are not trained: a vision tower, by the names that models and Megatron give it, and others by their own."""
    key = f"{section}.model_args.freeze_module_prefix"
    given = keys[key] if keys.ledger.find(key) else None
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given or []
    others = [name for name in names if name not in VISION_TOWERS]
    tower = {f"{ours}.freeze_vision": True} if len(others) < len(names) else {}
    return tower | ({f"{ours}.freeze": others} if others else {})


def recomputes(keys: Reader, section: str) -> bool:
    """Return True when activations are recomputed; Megatron has its own keys for that."""
    off = f"{section}.model_args.disable_gradient_checkpointing"
    if keys[f"{section}.strategy_args.strategy_name"] == "megatron_train":
        keys.ignore(off, "Megatron goes by recompute_granularity, in ROLL too")
        return keys[f"{section}.{CONFIG}.recompute_granularity"] is not None
    return not keys[off]


def data(keys: Reader) -> dict[str, Any]:
    """Files and columns."""
    fields: dict[str, Any] = {"data.overlong_prompts": "filter", "data.max_prompt_tokens": count(keys, "prompt_length")}
    files = keys[f"{_DATA}.file_name"]
    if not files:
        keys.problem("no training file is named", key=f"{_DATA}.file_name", fix=f"use {_DATA}.file_name=FILE")
        files = ["missing"]
    fields["data.train_files"] = [files] if isinstance(files, str) else files
    prompt, messages = keys[f"{_DATA}.prompt"], keys[f"{_DATA}.messages"]
    if prompt is not None and messages is not None:
        keys.problem("prompt and messages are both given", key=f"{_DATA}.prompt",
                     fix="keep messages for a column of chat messages, prompt for a column of texts")  # fmt: skip
    if prompt is not None and messages is None:
        keys.warn(
            f"{_DATA}.prompt={prompt}: its text becomes a user message in the chat template; ROLL tokenizes it as it is"
        )
    if prompt is not None or messages is not None:
        fields["data.prompt_column"] = messages or prompt
    if keys.written(f"{_DATA}.tag") and keys[f"{_DATA}.tag"] is not None:
        fields["data.data_source_column"] = keys[f"{_DATA}.tag"]
    pixels = {name: f"{_DATA}.image_{name}" for name in ("max_pixels", "min_pixels")}
    written = {name: keys[key] for name, key in pixels.items() if keys.written(key)}
    return fields | ({"data.image_options": written} if written else {})


def lengths(keys: Reader) -> dict[str, Any]:
    """The longest response, in training and in validation."""
    keys.ignore("actor_infer.generating_args.max_new_tokens", "it is sequence_length - prompt_length (or response_length), in "
                "ROLL since 2025-06 too")  # fmt: skip
    keys.ignore("val_batch_size", "RLVR validates on all rows, in ROLL too")
    prompt, total, response = keys["prompt_length"], keys["sequence_length"], keys["response_length"]
    fields: dict[str, Any] = {}
    if total is None and response is None:
        keys.problem("neither response_length nor sequence_length is given", key="response_length",
                     fix="use response_length=1024, or another number of tokens")  # fmt: skip
    elif total is not None:
        keys.ignore("response_length", f"sequence_length goes before it: responses have {total} - {prompt} tokens")
        response = total - prompt
        if response < 1:
            keys.problem(f"sequence_length={total} leaves no room beside prompts of {prompt} tokens", key="sequence_length",
                         fix=f"use sequence_length={prompt + 1024}, or shorter prompts")  # fmt: skip
            response = None
    if response is not None:
        fields["rollout.max_response_tokens"] = response
    val_prompt, val_total = keys["val_prompt_length"], keys["val_sequence_length"]
    if (val_prompt is None) != (val_total is None):
        given, other = ("val_prompt_length", "val_sequence_length")[:: 1 if val_total is None else -1]
        keys.problem(f"{given} is given and {other} is not", key=given, fix=f"give both, or remove {given}")
    elif val_prompt is not None and val_total is not None:
        left = val_total - val_prompt
        if left < 1:
            keys.problem(f"val_sequence_length={val_total} leaves no room beside prompts of {val_prompt} tokens",
                         key="val_sequence_length", fix=f"use val_sequence_length={val_prompt + 1024}")  # fmt: skip
        elif left != response:
            fields["validation.max_response_tokens"] = left
    return fields


def validation(keys: Reader) -> dict[str, Any]:
    """Files, sampling and cadence of validation; empty without files."""
    files = keys["validation.data_args.file_name"]
    if not files:
        for key in ("validation", "eval_steps", "val_prompt_length", "val_sequence_length"):
            keys.ignore(key, "there is no validation: validation.data_args.file_name is not given")
        return {}
    fields = plain(keys, "validation")
    fields["data.validation_files"] = [files] if isinstance(files, str) else files
    penalty = keys["validation.generating_args.repetition_penalty"]
    if penalty != 1:
        fields["validation.engine_sampling.repetition_penalty"] = penalty
    every = keys["eval_steps"]
    if every < 1:
        keys.problem(f"eval_steps is {every}, and there are validation files (ROLL fails with 0)", key="eval_steps",
                     fix="use eval_steps=10, or remove validation.data_args")  # fmt: skip
        every = 1
    return fields | {
        "validation.every_steps": every,
        "validation.before_training": True,
        "validation.after_training": False,
    }


def cadence(keys: Reader) -> dict[str, Any]:
    """Steps, and what is kept of them."""
    steps = {"run.total_steps": count(keys, "max_steps"), "tracking.samples_every_steps": count(keys, "logging_steps")}
    return steps | records(keys)


def records(keys: Reader) -> dict[str, Any]:
    """Checkpoints, trackers, folders, profiles."""
    fields: dict[str, Any] = {"checkpoint.every_steps": count(keys, "save_steps")}
    keep = keys["max_ckpt_to_keep"]
    if keep < 0:
        keys.problem(
            f"max_ckpt_to_keep is {keep}", key="max_ckpt_to_keep", fix="use 0 to keep all, or a number of checkpoints"
        )
    elif keep:
        fields["checkpoint.keep_last"] = keep
    resume = keys["resume_from_checkpoint"]
    if isinstance(resume, str):
        fields["run.resume_path"] = resume
        if "/" not in resume and not Path(resume).is_dir():
            what = f"resume_from_checkpoint is {resume!r}, neither true nor false, and there is no such folder"
            fix = "write true for the run's newest checkpoint, or the path of a global_step_N folder"
            keys.problem(what, key="resume_from_checkpoint", fix=fix)
    fields["run.resume"] = "never" if resume is False else "auto"
    if keys.written("output_dir"):
        fields["run.folder"] = f"{keys['output_dir'].rstrip('/')}/{keys['exp_name']}"
    tracker = keys["track_with"]
    if keys.written("track_with") and tracker in _OTHER_TRACKERS:
        keys.warn(f"track_with={tracker}: there is no such tracker here, so metrics go to the console and to metrics.jsonl in "
                  "the run folder (posttrain show, posttrain report); tensorboard, wandb and swanlab are supported")  # fmt: skip
        fields |= tracking(["console"], "roll")
    elif keys.written("track_with") and tracker:
        fields |= tracking(["console", *([] if tracker == "stdout" else [tracker])], "roll")
    if keys["profiler_timeline"] and keys["profiler_memory"]:
        keys.problem(
            "profiler_timeline and profiler_memory are both true", key="profiler_timeline", fix="keep one of them"
        )
    _check_variables(keys)
    return fields | _profiling(keys)


def _profiling(keys: Reader) -> dict[str, Any]:
    """Profiles, and records that a replay can learn from."""
    fields: dict[str, Any] = {}
    if keys["profiler_timeline"] or keys["profiler_memory"]:
        fields["profiling.steps"] = [1, 2, 3]
        fields["profiling.folder"] = keys["profiler_output_dir"]
    else:
        keys.ignore("profiler_output_dir", "neither profiler_timeline nor profiler_memory is true")
    if keys["profiler_memory"]:
        fields |= {"profiling.memory": True, "profiling.operators": False}
    if keys.ledger.find("rollout_mock.enable") and keys["rollout_mock.enable"]:
        if keys["rollout_mock.mode"] == "mock":
            keys.problem(
                "rollout_mock.mode=mock replays recorded rollouts, and a run here only records them",
                key="rollout_mock.mode",
                fix="record with rollout_mock.mode=dump, then use posttrain replay train RUN_DIR",
            )
        fields["tracking.batches_every_steps"] = 1
    return fields


def _check_variables(keys: Reader) -> None:
    for name, value in keys.section("system_envs").items():
        if not isinstance(value, str):
            keys.problem(f"system_envs.{name} must be text, not {value!r}", key=f"system_envs.{name}",
                         fix=f'write {name}: "{value}"')  # fmt: skip


def sampling(keys: Reader) -> dict[str, Any]:
    """Return the remaining settings of the sampler."""
    fields: dict[str, Any] = {}
    penalty = keys["actor_infer.generating_args.repetition_penalty"]
    if penalty != 1:
        fields["rollout.engine_sampling.repetition_penalty"] = penalty
    ratio = keys["async_generation_ratio"]
    if 0 < ratio < 1:
        keys.problem(f"async_generation_ratio is {ratio:g}", key="async_generation_ratio", fix="use 0, or at least 1")
    if ratio < 0:
        keys.problem(
            f"async_generation_ratio is {ratio:g}", key="async_generation_ratio", fix="use 0 for synchronous rollouts"
        )
    if ratio > 0 and keys["generate_opt_level"] != 1:
        keys.problem(f"asynchronous rollouts need generate_opt_level=1, and it is {keys['generate_opt_level']}",
                     key="generate_opt_level", fix="use generate_opt_level=1")  # fmt: skip
    if keys["is_use_additional_prompts"] and keys["max_additional_running_prompts"] < 1:
        keys.problem("is_use_additional_prompts needs max_additional_running_prompts above 0",
                     key="max_additional_running_prompts", fix="use max_additional_running_prompts=16")  # fmt: skip
    temperature = keys["actor_infer.generating_args.temperature"]
    if temperature != 1:
        keys.warn(f"actor_infer.generating_args.temperature={temperature:g} divides the logits in training too; ROLL computes "
                  "log-probs for training at temperature 1")  # fmt: skip
    return fields
