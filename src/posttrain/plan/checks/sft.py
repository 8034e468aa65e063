"""Rules between the keys of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.checks.profiling import profiling_warnings
from posttrain.config.checks.run import (
    naming_problems,
    resuming_problems,
    retention_warnings,
    saving_warnings,
    within_epochs_warnings,
)
from posttrain.config.checks.tracking import tracking_warnings
from posttrain.config.checks.training import (
    decay_problems,
    frozen_warnings,
    precision_problems,
    role_warnings,
    schedule_problems,
)
from posttrain.config.sft import SftConfig, SftDataConfig, TextDataConfig
from posttrain.config.tracking import TrackingConfig
from posttrain.errors import Problem
from posttrain.plan.checks.cluster import cluster_warnings, unsupported_cluster
from posttrain.plan.checks.distillation import distillation_problems, distillation_warnings
from posttrain.plan.checks.engines import engine_problems, engine_warnings, quantized_problems, sharded_saving_problems
from posttrain.plan.checks.libraries import missing_libraries
from posttrain.registry import TRACKERS, TRAIN_ENGINES

# What only conversations, and what only our own reading of files, looks at.
OF_CONVERSATIONS = ("tools_column", "enable_thinking_column", "train_on")
OF_OUR_READING = (
    "train_tokenized",
    "validation_tokenized",
    "messages_column",
    "prompt_column",
    "response_column",
    *OF_CONVERSATIONS,
    "tokenize_workers",
    "chat_template_options",
)
OF_A_CLASS = ("dataset_class_name", "dataset_class_options", "dataset_class_mask")


def check(config: SftConfig) -> list[Problem]:
    """Everything wrong with a configuration whose keys are right one by one."""
    return [
        *_names(config),
        *_data_problems(config.data),
        *naming_problems(config),
        *resuming_problems(config),
        *sharded_saving_problems(config),
        *quantized_problems(config),
        *precision_problems(config.model),
        *schedule_problems("policy", config.policy.schedule),
        *decay_problems("policy", config.policy.optimizer),
        *engine_problems(config),
        *distillation_problems(config),
    ]


def unsupported(config: SftConfig) -> list[Problem]:
    """Report valid settings that are planned but not built yet."""
    return [*unsupported_cluster(config), *missing_libraries(config)]


def warnings_of(config: SftConfig) -> list[str]:
    """Report settings that have no effect, in sentences."""
    policy = config.policy
    return [
        *_data_warnings(config.data),
        *_validation_warnings(config),
        *retention_warnings(config.checkpoint),
        *saving_warnings(config),
        *role_warnings("policy", policy.schedule, policy.optimizer, policy.lora),
        *frozen_warnings("model", config.model, "policy", policy.lora),
        *cluster_warnings(config.placement),
        *engine_warnings(config),
        *distillation_warnings(config),
        *tracking_warnings(config.tracking),
        *profiling_warnings(config),
        *_tracking_of_samples(config.tracking),
        *(
            ["policy.schedule_over has no effect: run.total_steps is null, so the run is all its epochs"]
            if policy.schedule_over == "epochs" and config.run.total_steps is None
            else []
        ),
        *within_epochs_warnings(config.run),
    ]


def _names(config: SftConfig) -> Iterator[Problem]:
    engine = config.policy.engine
    if engine not in TRAIN_ENGINES.names():
        yield TRAIN_ENGINES.problem(engine, "policy.engine")
    for index, name in enumerate(config.tracking.trackers):
        if name not in TRACKERS.names():
            yield TRACKERS.problem(name, f"tracking.trackers.{index}")


def _data_problems(data: TextDataConfig) -> Iterator[Problem]:
    if not data.train_files and data.dataset_class_file is None:  # a class may need none
        yield Problem("there is no training file", fix="write data.train_files: [FILE, ...]", field="data.train_files")
    if data.messages_column is not None:
        for name in ("prompt_column", "response_column"):
            if getattr(data, name) is not None:
                what = f"data.messages_column and data.{name} name two ways to write a row"
                yield Problem(what, fix="keep one of them", field=f"data.{name}")
    if isinstance(data, SftDataConfig):  # preferences, which this checks too, have no sources
        yield from _source_problems(data)
    if data.dataset_class_file is not None and data.dataset_class_name is None:
        what = f"data.dataset_class_file is {data.dataset_class_file}, and no class in it is named"
        yield Problem(what, fix="give data.dataset_class_name", field="data.dataset_class_name")


def _source_problems(data: SftDataConfig) -> Iterator[Problem]:
    for files in ("train", "validation"):
        field, names = f"data.{files}_sources", getattr(data, f"{files}_sources")
        count = len(getattr(data, f"{files}_files"))
        if names and data.dataset_class_file is not None:
            what = f"{field} names the sources of files, and a dataset class of your own reads them all at once"
            yield Problem(what, fix=f"remove {field}", field=field)
        elif names and len(names) != count:
            what = f"{field} has {len(names)} names for {count} files"
            yield Problem(what, fix="name the source of each file, in order", field=field)
    field, weights = "data.source_weights", data.source_weights
    if not weights:
        return
    if wrong := sorted(set(weights) ^ set(data.train_sources)):
        has = (
            f"has no weight for {wrong[0]}"
            if wrong[0] in data.train_sources
            else f"names {wrong[0]}, which is no source"
        )
        what = f"{field} {has} (data.train_sources: {', '.join(dict.fromkeys(data.train_sources)) or 'none'})"
        yield Problem(what, fix="give each source of data.train_sources a weight", field=field)
    if not data.shuffle:
        what = f"{field} draws at random, and data.shuffle is false"
        yield Problem(what, fix="remove one of them", field=field)


def _data_warnings(data: TextDataConfig) -> Iterator[str]:
    def changed(name: str) -> bool:
        field = type(data).model_fields.get(name)  # preferences have fewer than SFT
        return field is not None and bool(getattr(data, name) != field.default)

    own = data.dataset_class_file is not None
    pairs = data.prompt_column is not None or data.response_column is not None
    for name in OF_OUR_READING if own else OF_A_CLASS:
        if changed(name):
            why = "a dataset class of your own reads the files" if own else "data.dataset_class_file is null"
            yield f"data.{name} has no effect: {why}"
    for name in OF_CONVERSATIONS if pairs and not own else ():
        if changed(name):
            yield f"data.{name} has no effect: rows are a prompt and a response"


def _validation_warnings(config: SftConfig) -> Iterator[str]:
    if config.data.validation_files:
        return
    for name in ("every_steps", "each_epoch", "max_rows"):
        if getattr(config.validation, name):
            yield f"validation.{name} has no effect: data.validation_files names no file"


def _tracking_of_samples(tracking: TrackingConfig) -> Iterator[str]:
    for name in ("samples_every_steps", "batches_every_steps", "validation_samples"):
        if getattr(tracking, name) != TrackingConfig.model_fields[name].default:
            yield f"tracking.{name} has no effect: nothing is sampled in supervised fine-tuning"
