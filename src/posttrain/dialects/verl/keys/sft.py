"""Keys of sft_trainer.yaml: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, refused
from posttrain.dialects.verl.keys.lora import lora_rows
from posttrain.dialects.verl.keys.words import ALWAYS_PACKED

_OPTIONS = "policy.engine_options"
_PRECISION = Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"]
_ONE_EXTRA = "a list with one name, or the name"


def _listed(value: Any) -> Any:
    """verl takes one name or a list of them; null is none."""
    return [value] if isinstance(value, str) else value or []


def _cut(value: str) -> str:
    return value if value == "error" else f"truncate_{value}"


def _rule(name: str, type: Any, default: Any, fields: str, meaning: str, **more: Any) -> Key:
    return mapped(name, type, default, fields, meaning, by_rule=True, **more)


def _as(
    name: str, type: Any, default: Any, field: str, meaning: str, to: Callable[[Any], Any] | None = None, **more: Any
) -> Key:
    return mapped(name, type, default, field, meaning, to=to, **more)


_DATA: tuple[Key, ...] = (
    _as("data.train_batch_size", int, 256, "data.sequences_per_step", "sequences per update, on all devices together"),
    ignored("data.micro_batch_size", int | None, None, "verl does not read it, either", "sequences per pass"),
    _as(
        "data.micro_batch_size_per_gpu",
        int,
        4,
        "policy.sequences_per_micro_batch_per_device",
        "sequences per forward and backward pass on one device",
        note="verl takes the mean over micro-batches of their means (0.4 even sums them); here losses divide by the tokens "
        "of the whole step, so this number changes no result.",
    ),
    _as(
        "data.train_files", list[str] | str, "~/data/gsm8k/train.parquet", "data.train_files", "training files", _listed
    ),
    _as(
        "data.val_files",
        list[str] | str,
        "~/data/gsm8k/test.parquet",
        "data.validation_files",
        "validation files",
        _listed,
        note="verl leaves out what does not fill a batch; here every row counts.",
    ),
    _rule(
        "data.prompt_key", list[str] | str, "question", "data.prompt_column", f"column with the prompt: {_ONE_EXTRA}"
    ),
    _rule("data.response_key", list[str] | str, "answer", "data.response_column", "column with the response: the same"),
    _rule(
        "data.prompt_dict_keys",
        list[str] | None,
        None,
        "data.prompt_column",
        "names to follow inside that column",
        change="column.name.name",
    ),
    _rule(
        "data.response_dict_keys",
        list[str] | None,
        None,
        "data.response_column",
        "the same for the response",
        change="column.name.name",
    ),
    _rule(
        "data.multiturn.enable",
        bool,
        False,
        "data.messages_column",
        "rows hold whole conversations",
        change="true: the column that messages_key names",
        since="0.4",
        note="verl 0.4 marks the token before every learned one; here the assistant's own tokens are learned.",
    ),
    _rule("data.multiturn.messages_key", str, "messages", "data.messages_column", "column with them", since="0.4"),
    _rule("data.multiturn.tools_key", str, "tools", "data.tools_column", "column with the tools", since="0.4"),
    _rule(
        "data.multiturn.enable_thinking_key",
        str,
        "enable_thinking",
        "data.enable_thinking_column",
        "column that switches thinking on",
        since="0.4",
    ),
    _as("data.max_length", int, 1024, "data.max_tokens", "longest sequence, tokens"),
    _as(
        "data.truncation",
        Literal["error", "left", "right"],
        "error",
        "data.overlong",
        "what happens to longer ones",
        _cut,
        change="left: truncate_left; right: truncate_right",
    ),
    ignored(
        "data.balance_dp_token",
        bool,
        False,
        "losses divide by the tokens of the whole step, on however many devices",
        "weigh devices by their tokens",
    ),
    refused(
        "data.chat_template",
        str | None,
        None,
        "verl stops at any value, too; a Jinja file works: posttrain.model.chat_template_file",
        "chat template",
    ),
    _rule(
        "data.custom_cls.path",
        str | None,
        None,
        "data.dataset_class_file data.dataset_class_options data.dataset_class_mask",
        "file with a dataset class, which gets the section data as its config",
        since="0.4",
    ),
    _rule("data.custom_cls.name", str | None, None, "data.dataset_class_name", "name of that class", since="0.4"),
    ignored("data.use_shm", bool, False, "files are read once", "copy files to /dev/shm", since="0.4"),
)

_MODEL: tuple[Key, ...] = (
    _as("model.partial_pretrain", str, "~/models/gemma-1.1-7b-it", "model.path", "folder or hub id of the weights"),
    ignored("model.use_shm", bool, False, "weights are loaded once", "copy weights to /dev/shm", since="0.4"),
    _rule(
        "model.fsdp_config.model_dtype",
        _PRECISION,
        "fp32",
        "model.master_dtype",
        "precision of the weights that are trained; passes are computed in bf16",
        change="fp16 is refused: it needs loss scaling, which verl's SFT has not, either",
        since="0.4",
    ),
    mapped(
        "model.fsdp_config.wrap_policy.min_num_params",
        int,
        0,
        f"{_OPTIONS}.wrap_policy.min_num_params",
        "shard modules of at least so many parameters",
    ),
    _rule(
        "model.fsdp_config.wrap_policy.**",
        Any,
        ABSENT,
        f"{_OPTIONS}.wrap_policy",
        "other ways to choose what is sharded",
    ),
    mapped(
        "model.fsdp_config.cpu_offload",
        bool,
        False,
        f"{_OPTIONS}.cpu_offload",
        "keep the model on the CPU",
        note="Here it takes parameters, gradients and optimizer together, whatever offload_params says.",
    ),
    mapped("model.fsdp_config.offload_params", bool, False, f"{_OPTIONS}.offload_params", "its parameters, too"),
    _as(
        "model.external_lib",
        list[str] | str | None,
        None,
        "model.external_modules",
        "Python modules imported before the model is loaded",
        _listed,
    ),
    _as(
        "model.enable_gradient_checkpointing",
        bool,
        True,
        "model.gradient_checkpointing",
        "recompute activations",
        earlier={"0.2": False},
        note="verl's page shows False; the file of 0.4 says True.",
    ),
    _as("model.trust_remote_code", bool, False, "model.trust_remote_code", "let code from the model's folder run"),
    *(replace(row, entry="sft", since="") for row in lora_rows("model", "policy")[:3]),
    ignored(
        "model.use_liger",
        bool,
        False,
        "it changes speed, never the result; posttrain.model.liger=true turns it on, on a GPU",
        "Liger kernels",
    ),
    _rule(
        "model.strategy",
        Literal["fsdp", "fsdp2"],
        "fsdp2",
        "policy.engine",
        "training engine",
        change="on one device: local",
        since="0.4",
    ),
    _rule(
        "ulysses_sequence_parallel_size",
        int,
        1,
        "policy.sequence_parallel",
        "devices that share a sequence",
    ),
    ignored(
        "use_remove_padding",
        bool,
        False,
        ALWAYS_PACKED,
        "pack sequences; must be true with sequence parallelism",
    ),
)

_OPTIM: tuple[Key, ...] = (
    _as("optim.lr", float, 1e-5, "policy.optimizer.lr", "peak learning rate"),
    _as("optim.betas", list[float], [0.9, 0.95], "policy.optimizer.betas", "decay rates of AdamW's two averages"),
    _as("optim.weight_decay", float, 0.01, "policy.optimizer.weight_decay", "decoupled weight decay"),
    _as("optim.warmup_steps_ratio", float, 0.1, "policy.schedule.warmup_ratio", "warm-up as a share of the run"),
    _as("optim.clip_grad", float, 1.0, "policy.optimizer.max_grad_norm", "clip the global gradient norm to this"),
    _as(
        "optim.lr_scheduler",
        Literal["cosine", "wsd"],
        "cosine",
        "policy.schedule.name",
        "shape of the learning rate",
        {"cosine": "cosine", "wsd": "warmup_stable_decay"}.__getitem__,
        change="wsd: warmup_stable_decay, which falls in the last tenth",
        since="0.4",
    ),
)

_TRAINER: tuple[Key, ...] = (
    _as(
        "trainer.default_local_dir",
        str,
        "/tmp/sft_model",
        "run.folder checkpoint.folder",
        "folder of the checkpoints; here of everything the run writes",
    ),
    _rule(
        "trainer.default_hdfs_dir",
        str | None,
        "hdfs://tmp/experiments/gsm8k/gemma-1.1-7b-it/",
        "checkpoint.upload",
        "remote folder that checkpoints are copied to",
        change="not written: none, since verl's default is somebody's own folder",
    ),
    ignored("trainer.resume_path", str | None, None, "verl does not read it, either", "checkpoint to go on from"),
    _as("trainer.project_name", str, "gsm8k-sft", "tracking.project", "project in the trackers"),
    _as("trainer.experiment_name", str, "test", "run.name", "name of the run"),
    _as("trainer.total_epochs", int, 4, "run.total_epochs", "passes over the data"),
    _rule(
        "trainer.total_training_steps",
        int | None,
        None,
        "run.total_steps policy.schedule_over",
        "stop after so many updates",
        note="As in verl, the learning rate stays that of total_epochs passes.",
    ),
    _rule(
        "trainer.logger",
        list[str] | str,
        ["console"],
        "tracking.trackers tracking.dialect_names",
        "trackers",
        change="tracking: wandb; file: none, since metrics.jsonl is always written. Services are sent verl's names too",
        note="Was the text console in some versions.",
    ),
    _as("trainer.seed", int, 1, "run.seed", "seed of the data order"),
    _rule(
        "trainer.save_freq",
        int,
        -1,
        "checkpoint.every_steps",
        "updates between checkpoints, besides the last; -1: the last only",
        since="0.4",
        note="verl stops at 0. verl 0.2 saves after every epoch.",
    ),
    _rule(
        "trainer.test_freq",
        int,
        -1,
        "validation.every_steps",
        "updates between validations, besides the last; -1: the last only",
        since="0.4",
        note="verl stops at 0. verl 0.2 validates after every epoch.",
    ),
    _rule(
        "trainer.nnodes",
        int,
        1,
        "placement.nodes placement.devices",
        "machines",
        change="x n_gpus_per_node",
        since="0.4",
    ),
    _rule("trainer.n_gpus_per_node", int, 8, "placement.devices", "devices of each", change="x nnodes", since="0.4"),
    _as("trainer.max_ckpt_to_keep", int | None, None, "checkpoint.keep_last", "newest checkpoints kept", since="0.4"),
    _rule(
        "trainer.checkpoint.save_contents",
        list[str],
        ABSENT,
        "checkpoint.save_optimizer",
        "what is saved: model, optimizer, extra, hf_model",
        since="later",
    ),
    _rule(
        "trainer.checkpoint.load_contents",
        list[str],
        ABSENT,
        "checkpoint.load_optimizer checkpoint.load_schedule",
        "what is restored",
        since="later",
    ),
    _rule(
        "trainer.resume_mode",
        str,
        ABSENT,
        "run.resume",
        "auto, disable or resume_path",
        change="resume_path: auto; disable: never, which refuses a folder that holds a run",
        since="later",
    ),
    _rule("trainer.resume_from_path", str | None, ABSENT, "run.resume_path", "checkpoint to go on from", since="later"),
    _rule("trainer.device", Literal["cuda", "cpu"], ABSENT, "placement.device", "kind of device", since="later"),
)

ROWS: tuple[Key, ...] = tuple(replace(row, entry="sft") for row in (*_DATA, *_MODEL, *_OPTIM, *_TRAINER))
