"""Rules over several keys of SkyRL's supervised fine-tuning."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain.dialects.ledger import leaves
from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import ignore_all
from posttrain.dialects.skyrl.rules.roles import NO_OPTIONS, lora, optimizer, schedule
from posttrain.dialects.skyrl.rules.run import resumed, tracked
from posttrain.dialects.skyrl.strategies import MEGATRON
from posttrain.libraries.row_slices import split_slice
from posttrain.plan.engine import engine_called

UNCUT = 32768  # data.max_tokens where SkyRL cuts nothing
_DATASET, _SPLIT = "yahma/alpaca-cleaned", "train[:100]"  # SkyRL's own where none is named
_SPLIT_NAME = re.compile(r"\w[\w.-]*")
_SIZES = {
    "tensor_model_parallel_size": "policy.tensor_parallel",
    "pipeline_model_parallel_size": "policy.pipeline_parallel",
    "context_parallel_size": "policy.sequence_parallel",
}
_OF_DATA = (
    "train_datasets", "train_dataset_splits", "train_dataset_weights", "dataset_name", "dataset_split",
    "pretokenized_dataset_paths", "eval_datasets", "eval_dataset_splits", "eval_dataset_name", "eval_dataset_split",
    "eval_pretokenized_dataset_paths", "eval_interval", "eval_before_train", "num_steps", "num_epochs", "resume_from",
)  # fmt: skip
_FSDP = ("cpu_offload", "reshard_after_forward", "fsdp_size", "wrap_policy", "mixed_precision")


def sft_rules(keys: Reader) -> dict[str, Any]:
    """SftConfig fields by dotted name."""
    fields = _placement(keys) | _training_data(keys) | _validation(keys) | _rows(keys) | _length(keys)
    fields |= optimizer(keys, "optimizer_config", "policy") | lora(keys, "model.lora", "policy")
    fields |= schedule(keys, "optimizer_config", "policy", keys["optimizer_config.num_warmup_steps"])
    fields |= _micro_batches(keys) | _records(keys)
    return fields | tracked(keys, "logger") | _trial(keys)


def _trial(keys: Reader) -> dict[str, Any]:
    """Return the fields of a run on made-up texts of full length, which reads no data and keeps nothing; none for another."""
    if not keys["dummy_run_full_ctx"]:
        keys.ignore("dummy_run_max_steps", "read with dummy_run_full_ctx only")
        return {}
    longest = keys["max_length"]
    if longest is None:
        keys.problem(
            "dummy_run_full_ctx needs max_length, which is null", key="dummy_run_full_ctx", fix="use max_length=4096"
        )
    for key in _OF_DATA:
        keys.ignore(key, "dummy_run_full_ctx makes its texts up")
    keys.warn(
        f"dummy_run_full_ctx trains {keys['dummy_run_max_steps']} steps on made-up texts: a trial of memory and speed"
    )
    return {
        "data.train_files": [],
        "data.validation_files": [],
        "data.train_sources": [],
        "data.validation_sources": [],
        "data.source_weights": {},
        "data.train_tokenized": False,
        "data.validation_tokenized": False,
        "data.dataset_class_file": "pkg://posttrain.data.full_length",
        "data.dataset_class_name": "FullLengthTexts",
        "data.dataset_class_options": {"rows": keys["batch_size"], "tokens": longest or UNCUT},
        "run.total_steps": _at_least_one(keys, "dummy_run_max_steps"),
        "run.resume": "never",
        "validation.every_steps": None,
        "checkpoint.every_steps": None,
        "checkpoint.at_end": False,
        "checkpoint.export_every_steps": None,
    }


def _placement(keys: Reader) -> dict[str, Any]:
    nodes, each = (_at_least_one(keys, f"placement.num_{name}") for name in ("nodes", "gpus_per_node"))
    devices, strategy = nodes * each, keys["strategy"]
    fields: dict[str, Any] = {"placement.devices": devices, "placement.nodes": nodes}
    fields["policy.engine"] = engine_called(strategy, devices=devices)
    if strategy == MEGATRON:
        ignore_all(keys, ("fsdp_config", "sequence_parallel_size"), f"strategy is {strategy}")
        sizes = {field: _at_least_one(keys, f"megatron_config.{name}") for name, field in _SIZES.items()}
        unread = (*_SIZES, *NO_OPTIONS)
        given = {name: value for name, value in keys.section("megatron_config").items() if name not in unread}
    else:
        for name in _SIZES:
            keys.ignore(f"megatron_config.{name}", f"strategy is {strategy}")
        keys.ignore("megatron_config", f"strategy is {strategy}")
        sizes = {"policy.sequence_parallel": _at_least_one(keys, "sequence_parallel_size")}
        given = {name: keys[f"fsdp_config.{name}"] for name in _FSDP}
    split = 1
    for size in sizes.values():
        split *= size
    if devices % split:
        key = "megatron_config.tensor_model_parallel_size" if strategy == MEGATRON else "sequence_parallel_size"
        what = f"{devices} devices do not split into groups of {split} that share a model or a sequence"
        keys.problem(what, key=key, fix="use sizes whose product divides the devices")
    options = {name: value for name, value in leaves(given) if value is not None}
    return fields | sizes | {f"policy.engine_options.{name}": value for name, value in options.items()}


def _at_least_one(keys: Reader, key: str) -> int:
    if keys[key] < 1:
        keys.problem(f"{key} must be at least 1, not {keys[key]}", key=key, fix=f"use {key}=1, or more")
    return max(1, int(keys[key]))


def _training_data(keys: Reader) -> dict[str, Any]:
    stores = _stores(keys, "pretokenized_dataset_paths", ("train_datasets", "train_dataset_splits", "dataset_name"))
    names, splits = _named(keys, "train_datasets", "train_dataset_splits", "dataset_name", "dataset_split")
    names = names or [_DATASET]
    parts = _files(keys, names, splits or [_SPLIT] * len(names), "train_datasets", "train_dataset_splits")
    if stores is not None:
        names, parts = stores, [[store] for store in stores]
    fields: dict[str, Any] = {"data.train_files": [file for part in parts for file in part]}
    if stores is not None:
        fields["data.train_tokenized"] = True
    weights = keys["train_dataset_weights"]
    if weights is not None:
        _check_weights(keys, weights, len(names))
    if len(names) == 1 or keys["sampler"] != "random":
        return fields
    titles = _distinct(names)
    fields["data.train_sources"] = [title for title, part in zip(titles, parts, strict=False) for _ in part]
    shares = weights or [1.0] * len(names)
    return fields | {"data.source_weights": dict(zip(titles, map(float, shares), strict=False))}


def _stores(keys: Reader, key: str, others: tuple[str, ...]) -> list[str] | None:
    """Return the paths of rows that are tokens already; None where the key names none."""
    found: list[str] | None = keys[key]
    if found is None:
        return None
    for other in others:
        if keys.written(other) and keys[other]:
            what = f"{key} and {other} both name data"
            keys.problem(what, key=key, fix="keep one of them")
    if not found:
        keys.problem(f"{key} is an empty list", key=key, fix="name a file or a folder, or write null")
    return found


def _check_weights(keys: Reader, weights: list[float], sources: int) -> None:
    key = "train_dataset_weights"
    if keys["sampler"] != "random":
        what = f"{key} is read with sampler=random, and sampler is {keys['sampler']}"
        keys.problem(what, key=key, fix="remove one of them")
    if len(weights) != sources:
        what = f"{key} has {len(weights)} weights for {sources} data sets"
        keys.problem(what, key=key, fix="write one for each")
    if any(weight <= 0 for weight in weights):
        keys.problem(f"{key} must all be above 0", key=key, fix="leave a data set out that has no share")


def _distinct(names: list[str]) -> list[str]:
    """Number names that occur again: a data set may be named twice, with other rows."""
    return [
        name if names[:i].count(name) == 0 else f"{name}#{names[:i].count(name) + 1}" for i, name in enumerate(names)
    ]


def _validation(keys: Reader) -> dict[str, Any]:
    others = ("eval_datasets", "eval_dataset_splits", "eval_dataset_name")
    stores = _stores(keys, "eval_pretokenized_dataset_paths", others)
    names, splits = _named(keys, "eval_datasets", "eval_dataset_splits", "eval_dataset_name", "eval_dataset_split")
    titles = keys["eval_dataset_names"]
    if not names and not stores:
        for key in ("eval_interval", "eval_before_train", "eval_dataset_names"):
            keys.ignore(key, "eval_datasets names no data set")
        return {"data.validation_files": []}
    parts = _files(keys, names, splits or ["validation"] * len(names), "eval_datasets", "eval_dataset_splits")
    if stores:
        names, parts = [PurePosixPath(store).name for store in stores], [[store] for store in stores]
    if titles and (len(titles) != len(names) or len(set(titles)) != len(titles) or not all(titles)):
        what = f"eval_dataset_names has the names {', '.join(titles)} for {len(names)} data sets"
        keys.problem(what, key="eval_dataset_names", fix="write a name of its own for each")
        titles = None
    titles = titles or _distinct([name.replace("/", "_") for name in names])
    every = keys["eval_interval"]
    return {
        "data.validation_files": [file for part in parts for file in part],
        "data.validation_sources": [title for title, part in zip(titles, parts, strict=False) for _ in part],
        "data.validation_tokenized": bool(stores),
        "validation.every_steps": every if every > 0 else None,
        "validation.before_training": keys["eval_before_train"],
        "validation.after_training": True,
    }


def _named(keys: Reader, names: str, splits: str, name: str, split: str) -> tuple[list[str], list[str]]:
    """Return data sets and splits, under the names of lists or the earlier ones of single texts."""
    for later, earlier in ((names, name), (splits, split)):
        if keys[later] and keys[earlier]:
            keys.problem(
                f"{later} took the place of {earlier}, and both are written", key=later, fix="keep one of them"
            )
    of_both = [
        keys[names] or ([keys[name]] if keys[name] else []),
        keys[splits] or ([keys[split]] if keys[split] else []),
    ]
    return of_both[0], of_both[1]


def _files(keys: Reader, names: list[str], splits: list[str], key: str, split_key: str) -> list[list[str]]:
    """Return the data files of each data set, with the slice of its rows that a split names; several where it is a sum."""
    if len(names) != len(splits):
        what = f"{split_key} has {len(splits)} splits, and {key} {len(names)} data sets"
        keys.problem(what, key=split_key, fix="name one split for each data set")
    found: list[list[str]] = []
    for name, text in zip(names, splits, strict=False):
        is_file = PurePosixPath(name).suffix in (".parquet", ".json", ".jsonl", ".csv", ".arrow") or Path(name).exists()
        found.append([])
        for part in re.split(r"\s*\+\s*", text):
            split, rows = split_slice(part)
            if not _SPLIT_NAME.fullmatch(split):
                what = f"{part} is no split: it is written train, train[:1000], train[200:240] or train[:10%]"
                keys.problem(what, key=split_key, fix=f"use {split_key}=[train]")
                continue
            found[-1].append((name if is_file else f"{name}:{split}") + ("" if rows is None else str(rows)))
    return found


def _rows(keys: Reader) -> dict[str, Any]:
    fields: dict[str, Any] = {"data.tokenize_workers": max(1, keys["num_workers"])}
    if keys["messages_key"] != "messages":
        fields["data.messages_column"] = keys["messages_key"]
    fields["data.system_column"] = keys["system_key"]
    fields["data.train_on"] = {"last_assistant_message": "last_turn"}.get(keys["train_on_what"], "all_turns")
    if keys["sampler"] == "custom":
        what = "sampler=custom draws rows by a class of your own, which is refused"
        keys.problem(what, key="sampler", fix="use sampler=random, or sequential with rows in your order", refused=True)
    fields["data.shuffle"] = keys["sampler"] != "sequential"
    longest = keys["max_length"]
    if longest is None:
        return fields | {"data.max_tokens": UNCUT, "data.overlong": "error"}
    return fields | {"data.max_tokens": longest, "data.overlong": "truncate_right"}


def _length(keys: Reader) -> dict[str, Any]:
    steps, most = keys["num_steps"], keys["max_training_steps"]
    if steps is not None and keys.written("num_epochs"):
        keys.problem("num_steps and num_epochs are both written", key="num_steps", fix="keep one of them")
    least = min((count for count in (steps, most) if count is not None), default=None)
    if steps is not None:
        return {"run.total_steps": least}
    fields: dict[str, Any] = {"run.total_epochs": 1 if keys["num_epochs"] is None else keys["num_epochs"]}
    return fields | ({} if least is None else {"run.total_steps": least})


def _micro_batches(keys: Reader) -> dict[str, Any]:
    size, budget = keys["micro_train_batch_size_per_gpu"], keys["max_tokens_per_microbatch"]
    if not keys["use_sequence_packing"]:
        keys.ignore("max_tokens_per_microbatch", "read with use_sequence_packing only")
        return {"policy.sequences_per_micro_batch_per_device": size}
    keys.ignore("micro_train_batch_size_per_gpu", "use_sequence_packing cuts micro-batches by tokens")
    longest = keys["max_length"]
    if longest is None:
        what = "use_sequence_packing needs max_length, which is null"
        keys.problem(what, key="use_sequence_packing", fix="use max_length=4096")
        return {}
    if budget is not None and budget < longest:
        what = f"max_tokens_per_microbatch={budget} has no room for a text of max_length={longest} tokens"
        keys.problem(what, key="max_tokens_per_microbatch", fix=f"use max_tokens_per_microbatch={longest}, or more")
    return {"policy.max_tokens_per_micro_batch": budget or longest}


def _records(keys: Reader) -> dict[str, Any]:
    """Checkpoints, exports, resuming, profiles."""
    every, kept, folder = keys["ckpt_interval"], keys["max_ckpts_to_keep"], keys["ckpt_path"]
    if kept == 0:
        what = "max_ckpts_to_keep=0 would keep no checkpoint"
        keys.problem(what, key="max_ckpts_to_keep", fix="use max_ckpts_to_keep=-1 for all, or 1")
    fields: dict[str, Any] = {
        "checkpoint.every_steps": every if every > 0 else None,
        "checkpoint.at_end": every > 0,
        "checkpoint.keep_last": kept if kept > 0 else None,
    }
    if folder:
        fields["checkpoint.folder"] = folder
    if keys["hf_save_interval"] > 0:
        fields["checkpoint.export_every_steps"] = keys["hf_save_interval"]
        exports = keys["export_path"] or (f"{folder}/hf_exports" if folder else None)
        fields |= {} if exports is None else {"checkpoint.export_folder": exports}
    else:
        keys.ignore("export_path", "hf_save_interval is 0: no models are exported")
    if keys["record_memory"]:
        memory = {"memory": True, "operators": False, "steps": "all", "phases": ["update"]}
        fields |= {f"profiling.{name}": value for name, value in memory.items()}
    start = keys["resume_from"]
    if start in ("", "latest"):
        return fields | {"run.resume": "auto" if start else "never"}
    return fields | resumed(keys, "resume_from", start, instead="resume_from=latest")
