"""Rules over several keys of ROLL's DPO pipeline."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.look import count
from posttrain.dialects.roll.rules.pipelines import refuse_diffusion
from posttrain.dialects.roll.rules.placement import Copies, device_ids, options, trained
from posttrain.dialects.roll.rules.run import frozen, precision, recomputes, records
from posttrain.dialects.roll.rules.sft import batches, data, length, update, validation
from posttrain.dialects.roll.rules.templates import template

SECTION, REFERENCE = "actor_train", "reference"
PROMPT = "instruction"  # the column of the prompt, which has no key


def dpo_rules(keys: Reader) -> dict[str, Any]:
    """TuneConfig fields by dotted name."""
    refuse_diffusion(keys)
    placed, copies = _placement(keys)
    fields = placed | _models(keys) | data(keys, SECTION) | batches(keys, SECTION, copies, sequences_per_row=2)
    fields |= length(keys, SECTION) | validation(keys) | update(keys, SECTION)
    fields |= {
        "method.name": "dpo",
        "method.loss": "ipo" if keys["ipo"] else "sigmoid",
        "data.prompt_column": PROMPT,
        "data.overlong": "filter",
        "reference.sequences_per_micro_batch_per_device": 2 * count(keys, f"{REFERENCE}.infer_batch_size"),
    }
    budget = f"{REFERENCE}.max_tokens_per_microbatch_in_infer"
    if keys[f"{REFERENCE}.use_dynamic_batching_in_infer"]:
        fields["reference.max_tokens_per_micro_batch"] = count(keys, budget)
    else:
        keys.ignore(budget, "read with use_dynamic_batching_in_infer only")
    if keys["ipo"] and keys["label_smoothing"]:
        keys.ignore("label_smoothing", "ipo has no labels to smooth, in ROLL either")
        fields["method.label_smoothing"] = 0.0
    return fields | records(keys) | template(keys, SECTION, pairs=True)


def _placement(keys: Reader) -> tuple[dict[str, Any], Copies]:
    ids, theirs = device_ids(keys, SECTION), device_ids(keys, REFERENCE)
    used = sorted({*ids, *theirs})
    devices = max(1, len(used))
    if used and used != list(range(devices)):
        key = f"{SECTION}.device_mapping"
        what = (
            f"{SECTION} and {REFERENCE} are all that works in this run, and their devices do not count from 0: {used}"
        )
        keys.problem(what, key=key, fix=f"use {key}='list(range(0,{len(ids) or 1}))'")
    nodes = -(-devices // count(keys, "num_gpus_per_node"))
    fields: dict[str, Any] = {"placement.devices": devices, "placement.nodes": nodes}
    copies = trained(keys, "policy", SECTION, ids, fields)
    fields |= options(keys, "reference", REFERENCE, keys[f"{REFERENCE}.strategy_args.strategy_name"])
    if ids and ids != list(range(devices)):
        fields["policy.devices"] = ids
    if theirs and theirs != ids:
        fields["reference.devices"] = theirs
    return fields, copies


def _models(keys: Reader) -> dict[str, Any]:
    """Return the paths. Those of the workers count only where both are given, as in ROLL."""
    own, theirs = (keys[f"{section}.model_args.model_name_or_path"] for section in (SECTION, REFERENCE))
    if own is None or theirs is None:
        for section in (SECTION, REFERENCE):
            key = f"{section}.model_args.model_name_or_path"
            keys.ignore(key, "pretrain takes precedence where only one of the two workers names a model, in ROLL too")
        own = theirs = keys["pretrain"]
    if own is None:
        keys.problem("no model is named", key="pretrain", fix="use pretrain=FOLDER, or a hub id")
    fields: dict[str, Any] = {} if own is None else {"model.path": own}
    if theirs != own:
        fields["reference.path"] = theirs
    fields["model.gradient_checkpointing"] = recomputes(keys, SECTION)
    return fields | precision(keys, SECTION) | frozen(keys, SECTION)
