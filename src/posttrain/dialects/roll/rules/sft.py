"""Rules over several keys of ROLL's SFT pipeline."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.distil_texts import distil_texts
from posttrain.dialects.roll.rules.look import count, warmup
from posttrain.dialects.roll.rules.lora import lora
from posttrain.dialects.roll.rules.placement import Copies, device_ids, trained
from posttrain.dialects.roll.rules.run import frozen, precision, recomputes, records
from posttrain.dialects.roll.rules.templates import template

SECTION = "sft_train"


def sft_rules(keys: Reader) -> dict[str, Any]:
    """SftConfig fields by dotted name."""
    placed, copies = _placement(keys)
    fields = placed | _model(keys) | data(keys, SECTION) | batches(keys, SECTION, copies)
    fields |= length(keys, SECTION) | validation(keys) | update(keys, SECTION)
    # rows come in the order of the files, as in ROLL
    return fields | {"data.shuffle": False} | records(keys) | template(keys, SECTION) | distil_texts(keys)


def update(keys: Reader, section: str) -> dict[str, Any]:
    """Return the settings of optimizer, warm-up and adapter of a policy that is trained on files."""
    args = f"{section}.training_args"
    clip = keys["max_grad_norm"]
    fields: dict[str, Any] = {"policy.optimizer.betas": [keys[f"{args}.adam_beta1"], keys[f"{args}.adam_beta2"]]}
    fields["policy.optimizer.max_grad_norm"] = clip if clip > 0 else None
    return fields | warmup(keys, section, "policy") | lora(keys, section, "policy")


def _placement(keys: Reader) -> tuple[dict[str, Any], Copies]:
    ids = device_ids(keys, SECTION)
    devices = max(1, len(ids))
    if ids and ids != list(range(devices)):
        key = f"{SECTION}.device_mapping"
        what = f"{SECTION} is all that works in this run, and its devices do not count from 0: {ids}"
        keys.problem(what, key=key, fix=f"use {key}='list(range(0,{devices}))'")
    nodes = -(-devices // count(keys, "num_gpus_per_node"))
    fields: dict[str, Any] = {"placement.devices": devices, "placement.nodes": nodes}
    return fields, trained(keys, "policy", SECTION, ids, fields)


def _model(keys: Reader) -> dict[str, Any]:
    path = keys["pretrain"]
    if path is None:
        keys.problem("no model is named", key="pretrain", fix="use pretrain=FOLDER, or a hub id")
    named = {} if path is None else {"model.path": path}
    checkpointing = {"model.gradient_checkpointing": recomputes(keys, SECTION)}
    return named | checkpointing | precision(keys, SECTION) | frozen(keys, SECTION)


def data(keys: Reader, section: str) -> dict[str, Any]:
    """Return files and lengths."""
    fields: dict[str, Any] = {}
    key = f"{section}.data_args.file_name"
    files = keys[key]
    if not files:
        keys.problem("there is no training file", key=key, fix=f"use {key}=FILE.jsonl")
    else:
        fields["data.train_files"] = [files] if isinstance(files, str) else files
    if keys["sequence_length"] is None:
        keys.problem("the longest text is not given", key="sequence_length", fix="use sequence_length=2048")
    else:
        fields["data.max_tokens"] = count(keys, "sequence_length")
    return fields


def batches(keys: Reader, section: str, policy: Copies, *, sequences_per_row: int = 1) -> dict[str, Any]:
    """Return the sizes of a step, in sequences; ROLL counts rows."""
    args = f"{section}.training_args"
    micro = count(keys, f"{args}.per_device_train_batch_size") * sequences_per_row
    steps = count(keys, f"{args}.gradient_accumulation_steps")
    fields: dict[str, Any] = {"data.sequences_per_step": micro * steps * policy.copies}
    budget = f"{section}.max_tokens_per_microbatch_in_train"
    if not keys[f"{section}.use_dynamic_batching_in_train"]:
        keys.ignore(budget, "read with use_dynamic_batching_in_train only")
        return fields | {"policy.sequences_per_micro_batch_per_device": micro}
    if keys[budget] < 1:
        fix = f"use {budget}={keys['sequence_length'] or 8192} or more"
        keys.problem("use_dynamic_batching_in_train needs a number of tokens", key=budget, fix=fix)
    return fields | {"policy.max_tokens_per_micro_batch": keys[budget] or None}


def length(keys: Reader, section: str) -> dict[str, Any]:
    key = f"{section}.training_args.num_train_epochs"
    epochs, steps = keys[key], keys["max_steps"]
    if epochs != int(epochs) or epochs < 1:
        keys.problem(f"{key} is {epochs:g}, and epochs are whole", key=key, fix=f"use {key}={max(1, round(epochs))}")
        epochs = 1
    return {"run.total_epochs": int(epochs)} | ({"run.total_steps": steps} if steps > 0 else {})


def validation(keys: Reader) -> dict[str, Any]:
    files = keys["validation.data_args.file_name"]
    if not files:
        keys.ignore("eval_steps", "validation.data_args.file_name names no file")
        return {"data.validation_files": []}
    return {
        "data.validation_files": [files] if isinstance(files, str) else files,
        "validation.every_steps": count(keys, "eval_steps"),
        "validation.before_training": True,
        "validation.after_training": False,
    }
