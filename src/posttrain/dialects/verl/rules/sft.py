"""Rules over several keys of sft_trainer.yaml."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.heads import refuse_joint_loss
from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import engine_options, get, kind_of_device
from posttrain.dialects.verl.rules.lora import lora
from posttrain.dialects.verl.rules.records import contents, resume, trackers
from posttrain.dialects.verl.rules.sft_engine import (
    engine_fields,
    engine_layout,
    is_engine,
    masters,
    name_engine,
    optimizer,
    schedule,
)
from posttrain.dialects.verl.strategies import SHARDED
from posttrain.dialects.words import OUR_SECTION
from posttrain.plan.engine import engine_called

AFTER_EACH_EPOCH = "after_each_epoch"


def sft_rules(keys: Reader) -> dict[str, Any]:
    """SftConfig fields by dotted name."""
    name_engine(keys)
    later = is_engine(keys)
    fields = (engine_fields(keys) if later else _columns(keys) | _precision(keys)) | _dataset_class(keys)
    refuse_joint_loss(keys, "model")
    fields |= lora(keys, "model", "policy") | _layout(keys) | _length(keys, later) | _cadence(keys) | trackers(keys)
    fields |= schedule(keys) | optimizer(keys) | _template(keys)
    if get(keys, "trainer.resume_mode") is not None:
        fields |= resume(keys)
    fields |= contents(keys, "checkpoint" if later else "trainer.checkpoint")
    if keys.written("trainer.default_hdfs_dir"):
        fields["checkpoint.upload"] = keys["trainer.default_hdfs_dir"]
    if not keys.ledger.find("optim.lr_scheduler"):  # verl 0.2 knows no other
        fields["policy.schedule.name"] = "cosine"
    if keys.ledger.find("trainer.device") and keys.written("trainer.device"):
        fields["placement.device"] = kind_of_device(keys)
    return fields


def _template(keys: Reader) -> dict[str, Any]:
    options = keys.section("data.apply_chat_template_kwargs")
    return {"data.chat_template_options": options} if options else {}


def _columns(keys: Reader) -> dict[str, Any]:
    """Return the columns of prompt and response, or of whole conversations."""
    if get(keys, "data.multiturn.enable", False):
        for name in ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys"):
            keys.ignore(f"data.{name}", "data.multiturn.enable reads whole conversations")
        return {
            "data.messages_column": keys["data.multiturn.messages_key"],
            "data.tools_column": keys["data.multiturn.tools_key"],
            "data.enable_thinking_column": keys["data.multiturn.enable_thinking_key"],
        }
    for name in ("messages_key", "tools_key", "enable_thinking_key"):
        keys.ignore(f"data.multiturn.{name}", "data.multiturn.enable is false")
    fields = {}
    for kind in ("prompt", "response"):
        named = keys[f"data.{kind}_key"]
        if isinstance(named, list) and len(named) != 1:
            what = f"data.{kind}_key names {len(named)} columns, and a {kind} is in one"
            keys.problem(what, key=f"data.{kind}_key", fix="name one column")
            continue
        column = named if isinstance(named, str) else named[0]
        fields[f"data.{kind}_column"] = ".".join([column, *(keys[f"data.{kind}_dict_keys"] or [])])
    return fields


def _dataset_class(keys: Reader) -> dict[str, Any]:
    """A class of the user's sees the section data as verl has it, and marks the places that predict learned tokens."""
    path = get(keys, "data.custom_cls.path")
    if path is None:
        keys.ignore("data.custom_cls.name", "data.custom_cls.path is null")
        return {}
    return {
        "data.dataset_class_file": path,
        "data.dataset_class_name": keys["data.custom_cls.name"],
        "data.dataset_class_options": keys.section("data"),
        "data.dataset_class_mask": "predictions",
    }


def _precision(keys: Reader) -> dict[str, Any]:
    return masters(keys, "model.fsdp_config.model_dtype")


def _devices(keys: Reader) -> tuple[int, int]:
    """Return machines, and devices of all of them: those that the launcher starts, else those of the keys."""
    nodes, per_node = get(keys, "trainer.nnodes", 1), get(keys, "trainer.n_gpus_per_node", 1)
    started = keys.section(f"{OUR_SECTION}.placement")
    counts = [started.get(name, value) for name, value in (("nodes", nodes), ("devices", nodes * per_node))]
    return (counts[0], counts[1]) if all(type(count) is int for count in counts) else (nodes, nodes * per_node)


def _layout(keys: Reader) -> dict[str, Any]:
    """Return devices and engine. torchrun's processes win over the keys, as in verl, whose file of 0.2 has none: one device."""
    nodes, total = _devices(keys)
    shared = keys["ulysses_sequence_parallel_size"]
    devices = max(1, total)
    if is_engine(keys):
        placed = {"placement.nodes": nodes, "placement.devices": total}
        keys.ignore("model.fsdp_config", "the section engine says how the weights are shared out")
        return placed | engine_layout(keys, devices)
    if shared > 1 and devices % shared and keys.here:
        keys.warn(f"ulysses_sequence_parallel_size: 1 instead of {shared}, for the one device of --here")
        shared = 1
    if shared > 1 and devices % shared:
        key = "ulysses_sequence_parallel_size"
        fits = max(size for size in range(1, min(shared, devices) + 1) if devices % size == 0)
        what = f"{devices} devices do not split into groups of {shared} that share a sequence"
        keys.problem(what, key=key, fix=f"use {key}={fits}")
        shared = 1
    if shared > 1 and not keys["use_remove_padding"]:
        what = f"{shared} devices share a sequence, which needs packed sequences"
        keys.problem(what, key="ulysses_sequence_parallel_size", fix="use use_remove_padding=True")
    options = engine_options(keys, "model.fsdp_config", "policy.engine_options")
    wrapping = options | {
        f"policy.engine_options.wrap_policy.{name}": value
        for name, value in keys.section("model.fsdp_config.wrap_policy").items()
        if name != "min_num_params"
    }
    return wrapping | {
        "placement.nodes": nodes,
        "placement.devices": total,
        "policy.engine": engine_called(SHARDED[0], devices=devices),
        "policy.sequence_parallel": max(1, shared) if shared >= 0 else shared,
    }


def _length(keys: Reader, later: bool) -> dict[str, Any]:
    """The run ends at whichever comes first. Learning rates are those of the epochs, in verl's later program of the steps."""
    steps = keys["trainer.total_training_steps"]
    if steps is None:
        return {}
    length = {"run.total_steps": steps, "run.within_epochs": True}
    return length if later else length | {"policy.schedule_over": "epochs"}


def _cadence(keys: Reader) -> dict[str, Any]:
    fields: dict[str, Any] = {"validation.before_training": False}
    if not keys.ledger.find("trainer.save_freq"):  # verl 0.2: after every epoch
        return fields | {"validation.each_epoch": True, "checkpoint.each_epoch": True}
    for name, section in (("save_freq", "checkpoint"), ("test_freq", "validation")):
        every = keys[f"trainer.{name}"]
        if every == AFTER_EACH_EPOCH:
            fields[f"{section}.each_epoch"] = True
            continue
        if every == 0:
            key = f"trainer.{name}"
            keys.problem(f"{key} is 0, at which verl stops", key=key, fix=f"use {key}=-1 for the last update only")
        fields[f"{section}.every_steps"] = every if every > 0 else None
    return fields
