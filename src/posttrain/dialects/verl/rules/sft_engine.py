"""Rules of sft_trainer_engine.yaml (verl 0.6 and later), where they differ from those of sft_trainer.yaml."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.engine_schedules import OWN, ignore_others, schedule_of
from posttrain.dialects.verl.rules.look import balanced_as_in_verl, get, without_new_ones
from posttrain.dialects.verl.rules.optimizer import MEMORY_OF_MEGATRON, NO_NUMBER, OPTIMIZERS, STYLES
from posttrain.dialects.verl.strategies import MEGATRON, SHARDED, TORCHTITAN, TURBO, VEOMNI
from posttrain.plan.engine import engine_called

DTYPES = {
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
}
AUTOMODEL = "automodel"
_ULYSSES = {"sequence_parallel": "engine.ulysses_sequence_parallel_size"}
# The keys of parallel sizes, by strategy.
_SIZES = {
    MEGATRON: {
        "tensor_parallel": "engine.tensor_model_parallel_size",
        "pipeline_parallel": "engine.pipeline_model_parallel_size",
        "sequence_parallel": "engine.context_parallel_size",
    },
    VEOMNI: {"sequence_parallel": "engine.ulysses_parallel_size"},
    TORCHTITAN: {
        "tensor_parallel": "engine.tensor_parallel_size",
        "pipeline_parallel": "engine.pipeline_parallel_size",
        "sequence_parallel": "engine.context_parallel_size",
    },
    AUTOMODEL: {
        "tensor_parallel": "engine.tp_size",
        "pipeline_parallel": "engine.pp_size",
        "sequence_parallel": "engine.cp_size",
    },
    TURBO: {"sequence_parallel": "engine.turbo_config.distributed.ulysses_parallel_size"},
}
# Keys of the section engine that are no options of our engines.
_NO_OPTIONS = {
    "strategy",
    "model_dtype",
    "dtype",
    "ulysses_sequence_parallel_size",
    "turbo_config",
    "qat",
    "router_replay",
}
# verl's classes of the section engine -> the strategy
_CLASSES = {
    "FSDPEngineConfig": SHARDED[0],
    "McoreEngineConfig": MEGATRON,
    "VeOmniEngineConfig": VEOMNI,
    "TorchtitanEngineConfig": TORCHTITAN,
    "AutomodelEngineConfig": AUTOMODEL,
}
# Options that engines which shard as FSDP2 does have by the same names.
_OPTIONS_OF_OTHERS = ("param_offload", "optimizer_offload", "offload_policy", "fsdp_size", "forward_prefetch")
# transformer_engine's AdamW, whose masters and averages may have other precisions
_FUSED_ADAM = ("transformer_engine.pytorch.optimizers.fused_adam", "fusedadam")


def name_engine(keys: Reader) -> None:
    """Let all rules that follow read the strategy of a chosen file (``engine=megatron``) that names its class only."""
    target = str(keys.section("engine").get("_target_", "")).rpartition(".")[2]
    if get(keys, "engine.strategy") is None and target in _CLASSES:
        keys.put("engine.strategy", _CLASSES[target])


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
    fields |= _longest(keys)
    return fields | {"model.compute_dtype": DTYPES[keys["engine.dtype"]]} | masters(keys, "engine.model_dtype")


def _longest(keys: Reader) -> dict[str, Any]:
    """Return the longest sequence where its first prompt and the rest have limits of their own (pad_mode=left_right)."""
    parts = ("data.max_prompt_length", "data.max_response_length")
    if keys["data.pad_mode"] != "left_right":
        for key in parts:
            keys.ignore(key, "read with data.pad_mode=left_right only")
        return {}
    keys.ignore("data.max_length", "data.pad_mode=left_right reads max_prompt_length and max_response_length")
    if keys["data.truncation"] != "error":
        what = f"data.truncation={keys['data.truncation']} cuts whole sequences, at which verl stops with pad_mode=left_right"
        keys.problem(what, key="data.truncation", fix="use data.truncation=error, or data.pad_mode=no_padding")
    return {"data.max_tokens": sum(keys[key] for key in parts)}


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
    sizes = _SIZES.get(strategy, _ULYSSES)
    every = {key for names in (*_SIZES.values(), _ULYSSES) for key in names.values()}
    for key in every - set(sizes.values()):
        keys.ignore(key, f"the strategy {strategy} does not read it")
    fields: dict[str, Any] = {}
    split = 1
    for name, key in sizes.items():
        size = get(keys, key, 1)
        fields[f"policy.{name}"] = size
        split *= max(1, size)
    if devices % split and not keys.here:
        what = f"{devices} devices do not split into groups of {split} that share a model"
        key = next(key for key in sizes.values() if get(keys, key, 1) > 1)
        keys.problem(what, key=key, fix="use sizes whose product divides the devices")
    if strategy in SHARDED or strategy == MEGATRON:
        engine = engine_called(strategy, devices=devices)
        return fields | {"policy.engine": engine} | _options(keys, engine)
    splits_layers = any(fields.get(f"policy.{name}", 1) > 1 for name in ("tensor_parallel", "pipeline_parallel"))
    fields["policy.engine"] = engine_called(MEGATRON if splits_layers else SHARDED[0], devices=devices)
    for name in keys.section("engine"):
        if name not in (*_NO_OPTIONS, *_OPTIONS_OF_OTHERS) and f"engine.{name}" not in sizes.values():
            keys.ignore(f"engine.{name}", f"it sets speed or memory of {strategy}, whose numbers the engine here gives")
    return fields | (_options(keys, fields["policy.engine"], _OPTIONS_OF_OTHERS) if not splits_layers else {})


def _options(keys: Reader, engine: str, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the options of our engine: all that the section holds besides its known keys, or the ``only`` ones."""
    known = {row.name.rpartition(".")[2] for row in keys.ledger.rows if row.name.startswith("engine.")} - {"**"}
    options = {
        name: value
        for name, value in keys.section("engine").items()
        if name not in known | _NO_OPTIONS and value is not None and not name.startswith("_")
    }
    options = balanced_as_in_verl(keys, "engine", without_new_ones(keys, "engine", options, engine))
    return {f"policy.engine_options.{name}": value for name, value in options.items() if not only or name in only}


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
    elif (strategy := keys["engine.strategy"]) in OWN:
        return schedule_of(keys, "optim", ours, strategy=strategy, updates=1)
    elif strategy == AUTOMODEL:
        return fields | _automodel(keys, ours)
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


def _automodel(keys: Reader, ours: str) -> dict[str, Any]:
    """The schedule of Megatron, by shares of the peak. Source: verl, workers/engine/automodel."""
    style = "optim.lr_scheduler_type"
    name = STYLES.get(get(keys, style, "cosine") if keys.written(style) else "cosine")
    if name is None or name == "warmup_stable_decay":
        keys.problem(f"automodel's learning rate is constant, cosine or linear, not {keys[style]}", key=style)
        name = "cosine"
    fields: dict[str, Any] = {f"{ours}.name": name}
    warms = get(keys, "optim.lr_warmup_steps", -1) > 0 or get(keys, "optim.lr_warmup_steps_ratio", 0.0) > 0
    if warms:
        fields[f"{ours}.warmup_start_ratio"] = get(keys, "optim.init_lr_ratio", 0.1)
    else:
        keys.ignore("optim.init_lr_ratio", "there is no warm-up")
    if name != "constant":
        floor = "optim.min_lr_ratio"
        fields[f"{ours}.min_lr_ratio"] = get(keys, floor, 0.01) if keys.written(floor) else 0.01
    for other in ("num_cycles", "zero_indexed_step"):
        keys.ignore(f"optim.{other}", "automodel does not read it")
    return fields


def optimizer(keys: Reader) -> dict[str, Any]:
    """The optimizer's name and further arguments, which the earlier files do not have."""
    fields: dict[str, Any] = {}
    strategy = get(keys, "engine.strategy")
    if strategy in (AUTOMODEL, TORCHTITAN):
        fields["policy.optimizer.eps"] = get(keys, "optim.eps", 1e-8)
    ignore_others(keys, "optim", TORCHTITAN if strategy == AUTOMODEL else str(strategy))
    written = str(get(keys, "optim.optimizer", "AdamW"))
    name = OPTIMIZERS.get(written.lower()) or ("adamw" if written.lower() in _FUSED_ADAM else None)
    if name is None:
        what = f"there is no optimizer called {written} (known: AdamW, SGD, Muon)"
        keys.problem(what, key="optim.optimizer", fix="use optim.optimizer=AdamW")
    elif name != "adamw":
        fields["policy.optimizer.name"] = name
    for name, value in (get(keys, "optim.override_optimizer_config") or {}).items():
        if name in MEMORY_OF_MEGATRON and strategy == MEGATRON:
            keys.ignore(f"optim.override_optimizer_config.{name}", NO_NUMBER)
        elif name not in ("eps", "momentum"):
            key = "optim.override_optimizer_config"
            keys.problem(f"{name} is no argument of the optimizer that can be set here (eps, momentum)", key=key)
        else:
            fields[f"policy.optimizer.{name}"] = value
    return fields
