"""Rules of sft_trainer_engine.yaml (verl 0.6 and later), where they differ from those of sft_trainer.yaml."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.optimizer import MEMORY_OF_MEGATRON, OPTIMIZERS, STYLES
from posttrain.dialects.verl.strategies import MEGATRON, SHARDED_TEXT
from posttrain.plan.engine import engine_called

DTYPES = {
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
}
_SIZES = {
    "tensor_parallel": "engine.tensor_model_parallel_size",
    "pipeline_parallel": "engine.pipeline_model_parallel_size",
    "sequence_parallel": "engine.context_parallel_size",
}
_ULYSSES = "engine.ulysses_sequence_parallel_size"
# Keys of the section engine that are no options of our engines.
_NO_OPTIONS = {"strategy", "model_dtype", "dtype", "ulysses_sequence_parallel_size"}


def is_engine(keys: Reader) -> bool:
    """Return True for the trainer whose file has a section engine."""
    return get(keys, "engine.strategy") is not None


def engine_fields(keys: Reader) -> dict[str, Any]:
    """Model, conversations, micro-batches and precision of the later trainer."""
    fields: dict[str, Any] = {
        "data.messages_column": get(keys, "data.messages_key", "messages"),
        "data.tools_column": get(keys, "data.tools_key", "tools"),
        "data.enable_thinking_column": get(keys, "data.enable_thinking_key", "enable_thinking"),
        "model.path": get(keys, "model.path", keys["model.partial_pretrain"]),
        "model.config_overrides": keys.section("model.override_config"),
    }
    if keys["data.use_dynamic_bsz"]:
        keys.ignore("data.micro_batch_size_per_gpu", "micro-batches are cut by tokens (data.use_dynamic_bsz)")
        fields["policy.max_tokens_per_micro_batch"] = keys["data.max_token_len_per_gpu"]
    else:
        keys.ignore("data.max_token_len_per_gpu", "read with data.use_dynamic_bsz only")
    return fields | {"model.compute_dtype": DTYPES[keys["engine.dtype"]]} | masters(keys, "engine.model_dtype")


def masters(keys: Reader, key: str) -> dict[str, Any]:
    """Return the precision of the trained weights: float32 in place of float16, whose bits are too few for updates."""
    ours = DTYPES[get(keys, key, "fp32")]
    if ours == "float16":
        keys.warn(
            f"{key}: the trained weights are float32, because float16 rounds away updates below 1/2048 of a weight"
        )
        ours = "float32"
    return {"model.master_dtype": ours}


def engine_layout(keys: Reader, devices: int) -> dict[str, Any]:
    """Engine, parallel sizes and the engine's options."""
    strategy = keys["engine.strategy"]
    sizes = _SIZES if strategy == MEGATRON else {"sequence_parallel": _ULYSSES}
    for key in {*_SIZES.values(), _ULYSSES} - set(sizes.values()):
        keys.ignore(key, f"read by {SHARDED_TEXT if strategy == MEGATRON else MEGATRON} only")
    fields: dict[str, Any] = {"policy.engine": engine_called(strategy, devices=devices)}
    split = 1
    for name, key in sizes.items():
        fields[f"policy.{name}"] = keys[key]
        split *= max(1, keys[key])
    if devices % split and not keys.here:
        what = f"{devices} devices do not split into groups of {split} that share a model"
        key = next(key for key in sizes.values() if keys[key] > 1)
        keys.problem(what, key=key, fix="use sizes whose product divides the devices")
    ours = {row.name.rpartition(".")[2] for row in keys.ledger.rows if row.name.startswith("engine.")} - {"**"}
    options = {
        name: value
        for name, value in keys.section("engine").items()
        if name not in ours | _NO_OPTIONS and value is not None and not name.startswith("_")
    }
    return fields | {f"policy.engine_options.{name}": value for name, value in options.items()}


def schedule(keys: Reader) -> dict[str, Any]:
    """The learning rate by the later names; those that only the later trainer reads are ignored in the earlier one."""
    ours = "policy.schedule"
    fields: dict[str, Any] = {}
    ratio, steps = get(keys, "optim.lr_warmup_steps_ratio"), get(keys, "optim.lr_warmup_steps", -1)
    if steps > 0:
        fields |= {f"{ours}.warmup_updates": steps, f"{ours}.warmup_ratio": 0.0}
    elif ratio is not None:
        fields[f"{ours}.warmup_ratio"] = ratio
    if get(keys, "optim.zero_indexed_step", True) is False:
        fields[f"{ours}.counts_from"] = 1
    if not is_engine(keys):
        for name in ("lr_scheduler_type", "warmup_style"):
            keys.ignore(f"optim.{name}", "lr_scheduler is what this trainer reads")
        name = "cosine" if get(keys, "optim.lr_scheduler", "cosine") == "cosine" else ""
    elif keys["engine.strategy"] == MEGATRON:
        return fields | _megatron(keys, ours)
    else:
        name = get(keys, "optim.lr_scheduler_type") or get(keys, "optim.warmup_style", "constant")
        fields[f"{ours}.name"] = name
    if name == "cosine":
        for key, field in (("min_lr_ratio", "min_lr_ratio"), ("num_cycles", "cycles")):
            if (value := get(keys, f"optim.{key}")) is not None:
                fields[f"{ours}.{field}"] = value
    else:
        for key in ("min_lr_ratio", "num_cycles"):
            keys.ignore(f"optim.{key}", "read with a cosine only")
    return fields


def _megatron(keys: Reader, ours: str) -> dict[str, Any]:
    style, lr = get(keys, "optim.lr_decay_style", "constant"), keys["optim.lr"]
    fields: dict[str, Any] = {f"{ours}.name": STYLES[style]}
    floor, start = get(keys, "optim.min_lr", 0.0), get(keys, "optim.lr_warmup_init", 0.0)
    if style != "constant" and lr > 0 and floor:
        fields[f"{ours}.min_lr_ratio"] = floor / lr
    if lr > 0 and start:
        fields[f"{ours}.warmup_start_ratio"] = start / lr
    if style != "constant" and (end := get(keys, "optim.lr_decay_steps")) is not None:
        fields[f"{ours}.decay_updates"] = end
    return fields


def optimizer(keys: Reader) -> dict[str, Any]:
    """The optimizer's name and further arguments, which the earlier files do not have."""
    fields: dict[str, Any] = {}
    written = str(get(keys, "optim.optimizer", "AdamW"))
    name = OPTIMIZERS.get(written.lower())
    if name is None:
        what = f"there is no optimizer called {written} (known: AdamW, SGD, Muon)"
        keys.problem(what, key="optim.optimizer", fix="use optim.optimizer=AdamW")
    elif name != "adamw":
        fields["policy.optimizer.name"] = name
    for name, value in (get(keys, "optim.override_optimizer_config") or {}).items():
        if name in MEMORY_OF_MEGATRON and get(keys, "engine.strategy") == MEGATRON:
            why = "it sets where Megatron keeps the optimizer's numbers, and changes none"
            keys.ignore(f"optim.override_optimizer_config.{name}", why)
        elif name not in ("eps", "momentum"):
            key = "optim.override_optimizer_config"
            keys.problem(f"{name} is no argument of the optimizer that can be set here (eps, momentum)", key=key)
        else:
            fields[f"policy.optimizer.{name}"] = value
    return fields
