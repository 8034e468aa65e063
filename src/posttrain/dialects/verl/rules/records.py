"""Data columns, model loading, trackers, checkpoints, validation cadence."""

from __future__ import annotations

import re
from typing import Any

from posttrain.dialects.ledger import leaves
from posttrain.dialects.metric_names import tracking
from posttrain.dialects.own_keys import looks_misspelt
from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import engine_options, get, megatron_options
from posttrain.dialects.verl.rules.names import ACTOR, MODEL, REF
from posttrain.dialects.verl.strategies import MEGATRON, OTHERS
from posttrain.dialects.words import OUR_SECTION
from posttrain.errors import nearest
from posttrain.registry import TRACKERS

_UNKNOWN_HERE = ("vemlp_wandb", "clearml", "trackio")  # verl's trackers that no version of this program names
_PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "float32", "torch.float32"), "float32"),
    "fp16": "float16",
    "float16": "float16",
    "torch.float16": "float16",
}


_ALL_SHOWN = 1_000_000  # validation responses in a tracker, more than a validation has


def data(keys: Reader) -> dict[str, Any]:
    """Columns, overlong prompts, template variables, order."""
    fields: dict[str, Any] = {}
    for key, field in (("data.prompt_key", "data.prompt_column"), ("data.reward_fn_key", "data.data_source_column")):
        if keys.ledger.find(key) and keys.written(key):
            fields[field] = keys[key]
    cut = keys["data.truncation"]
    filters = keys["data.filter_overlong_prompts"] if keys.ledger.find("data.filter_overlong_prompts") else True
    if filters:
        off = "filter_overlong_prompts leaves out" if keys.ledger.version != "0.2" else "verl 0.2 leaves out"
        keys.ignore("data.truncation", f"{off} prompts that are too long")
    fields["data.overlong_prompts"] = "filter" if filters else cut if cut == "error" else f"truncate_{cut}"
    if keys["data.seed"] is not None:
        fields["data.seed"] = keys["data.seed"]
    for key, field in (
        ("data.apply_chat_template_kwargs", "data.chat_template_options"),
        ("data.mm_processor_kwargs", "data.image_options"),
    ):
        if options := keys.section(key):
            fields[field] = options
    if get(keys, "data.apply_chat_template", True) is False:
        fields["data.templated_prompts"] = "raw"
    return fields | _own_classes(keys)


def _own_classes(keys: Reader) -> dict[str, Any]:
    """Dataset and sampler classes of the user's, which see the section data as verl has it."""
    fields: dict[str, Any] = {}
    for kind, file, name in (
        ("dataset", "data.custom_cls.path", "data.custom_cls.name"),
        ("sampler", "data.sampler.class_path", "data.sampler.class_name"),
    ):
        path = get(keys, file)
        if path is None:
            keys.ignore(name, f"{file} is null")
            continue
        fields |= {f"data.{kind}_class_file": path, f"data.{kind}_class_name": get(keys, name)}
    return fields | ({"data.dataset_class_options": keys.section("data")} if fields else {})


def model(keys: Reader, *, has_critic: bool, has_reference: bool) -> dict[str, Any]:
    """Return the loading of weights, for all roles."""
    fields: dict[str, Any] = {
        "model.config_overrides": _overrides(keys, f"{MODEL}.override_config"),
        "model.external_modules": _modules(keys, has_critic=has_critic),
    }
    fields |= _precision(keys)
    if keys.written(f"{ACTOR}.use_torch_compile") and keys[f"{ACTOR}.use_torch_compile"]:
        fields["model.compile"] = True
    if has_critic:
        path = keys["critic.model.path"]
        fields |= {
            "critic.path": None if path == keys[f"{MODEL}.path"] else path,
            "critic.config_overrides": _overrides(keys, "critic.model.override_config"),
            "critic.gradient_checkpointing": keys["critic.model.enable_gradient_checkpointing"],
            "critic.activation_offload": get(keys, "critic.model.enable_activation_offload", False),
        }
    if has_reference:
        if keys[f"{ACTOR}.strategy"] == MEGATRON:
            fields["reference.engine_options"] = megatron_options(keys, REF)
        else:
            other = OTHERS.get(keys[f"{ACTOR}.strategy"])
            place = (other and other.section) or "fsdp_config"
            fields |= engine_options(keys, f"{REF}.{place}", "reference.engine_options")
        if (path := get(keys, f"{REF}.model.path")) is not None:
            fields["reference.path"] = path
    return fields


def _overrides(keys: Reader, key: str) -> dict[str, Any]:
    """Return fields of config.json to set: flat, as in the FSDP file, or below model_config, as in the Megatron file."""
    overrides = dict(keys[key] or {})
    overrides.pop("moe_config", None)
    nested = overrides.pop("model_config", None) or {}
    return {**overrides, **nested}


def _modules(keys: Reader, *, has_critic: bool) -> list[str]:
    """Return the modules of the actor, the critic and the reward model, each once, in this order."""
    places = [f"{MODEL}.external_lib"]
    places += ["critic.model.external_lib"] if has_critic else []
    places += ["reward_model.model.external_lib"] if keys["reward_model.enable"] else []
    found: list[str] = []
    for place in places:
        value = keys[place]
        found += [value] if isinstance(value, str) else value or []
    return list(dict.fromkeys(found))


def _precision(keys: Reader) -> dict[str, Any]:
    section = f"{ACTOR}.fsdp_config"
    for name in ("dtype", "mixed_precision.param_dtype"):
        key = f"{section}.{name}"
        given = get(keys, key)
        if given in _PRECISIONS:
            return {"model.compute_dtype": _PRECISIONS[given]}
        if given is not None:
            what = f"{key} is {given!r}; forward and backward passes are in bf16, fp32 or fp16"
            keys.problem(what, key=key, fix=f"use {key}=bf16")
    return {}


def critic(keys: Reader, aggregation: str) -> dict[str, Any]:
    """The critic's loss and length."""
    epochs = keys["critic.ppo_epochs"]
    fields = {
        "critic.value_clip": keys["critic.cliprange_value"],
        "critic.aggregation": aggregation,
        "critic.warmup_steps": max(0, keys["trainer.critic_warmup"] - 1),
    }
    return fields | ({} if epochs == keys[f"{ACTOR}.ppo_epochs"] else {"critic.epochs_per_step": epochs})


def without_critic(keys: Reader) -> None:
    """Tells what is written about a critic that is not there."""
    name = keys["algorithm.adv_estimator"]
    for row in keys.ledger.rows:
        if (
            row.name.startswith("critic.")
            and row.status == "mapped"
            and "*" not in row.name
            and row.name != "critic.enable"
        ):
            keys.ignore(row.name, f"no critic: {name} needs no values (gae would)")
    if keys["trainer.critic_warmup"] > 1:
        keys.ignore("trainer.critic_warmup", f"no critic: {name} needs no values (gae would)")


def without_reference(keys: Reader) -> None:
    """Tells what is written about a reference that is not there. Its profiler's keys are about phases that the actor has too."""
    rows = [row for row in keys.ledger.rows if row.name.startswith(f"{REF}.") and row.status == "mapped"]
    names = [row.name for row in rows if "*" not in row.name and not row.name.startswith(f"{REF}.profiler.")]
    names += [f"{REF}.megatron.{name}" for name in dict(leaves(keys.section(f"{REF}.megatron"))) if name]
    for name in names:
        if not _follows(keys, name):
            keys.ignore(name, "there is no reference: no KL is configured")


def _follows(keys: Reader, name: str) -> bool:
    """Return True when a key has the value of the key that it follows by default: copied from verl's file, it has no effect."""
    row = keys.ledger.find(name)
    followed = re.fullmatch(r"\$\{([\w.]+)\}", str(row.default)) if row is not None else None
    return followed is not None and bool(keys[name] == keys[followed[1]])


def trainer(keys: Reader) -> dict[str, Any]:
    """Trackers, cadences, checkpoints."""
    save, test = keys["trainer.save_freq"], keys["trainer.test_freq"]
    if isinstance(test, bool):
        keys.warn(f"trainer.test_freq={test} counts as {int(test)}")
        test = int(test)
    for name, value in (("save_freq", save), ("test_freq", test)):
        if value < -1:
            keys.warn(f"trainer.{name}={value} counts as never, as in verl; -1 is the usual word")
    fields = {
        "checkpoint.every_steps": save if save > 0 else None,
        "checkpoint.at_end": save > 0,
        "validation.every_steps": test if test > 0 else None,
        "validation.after_training": test > 0 or keys.ledger.version == "0.2",
    }
    spare = get(keys, "trainer.esi_redundant_time", 0)
    if keys.ledger.find("trainer.esi_redundant_time") and save > 0:
        fields["checkpoint.before_expiry_s"] = 60.0 + spare
    elif spare:
        keys.ignore("trainer.esi_redundant_time", "trainer.save_freq is not above 0, so nothing is saved")
    if get(keys, "trainer.val_only", False):
        fields["validation.only"] = True
        if get(keys, "trainer.val_before_train", True) is False:
            what = "with trainer.val_before_train=False verl trains, although trainer.val_only is true"
            keys.problem(what, key="trainer.val_only", fix="use trainer.val_before_train=True, or val_only=False")
    fields |= {
        "run.total_epochs": keys["trainer.total_epochs"],
        "run.total_steps": keys["trainer.total_training_steps"],
        "run.within_epochs": keys["trainer.total_training_steps"] is not None,
    }
    kept = get(keys, "trainer.max_actor_ckpt_to_keep") or None
    kept = None if kept is not None and kept < 0 else kept  # 0 and -1 keep all, as null does
    if keys["trainer.remove_previous_ckpt_in_save"]:
        key = "trainer.remove_previous_ckpt_in_save"
        if kept not in (None, 1):
            what = f"{key} keeps 1 checkpoint, and trainer.max_actor_ckpt_to_keep is {kept}"
            keys.problem(what, key=key, fix="remove it, it is deprecated")
        elif keys.ledger.version != "0.2":
            keys.warn(f"{key} is deprecated: write trainer.max_actor_ckpt_to_keep=1")
        kept = 1
    if kept is not None:
        fields["checkpoint.keep_last"] = kept
    if (callback := get(keys, "trainer.checkpoint_callback_class")) is not None:
        options = {name: value for name, value in keys.values.items() if name != OUR_SECTION}
        fields |= {"checkpoint.callback": callback, "checkpoint.callback_options": options}
    return fields | trackers(keys) | resume(keys)


def trackers(keys: Reader) -> dict[str, Any]:
    """Return the trackers."""
    given = keys["trainer.logger"]
    names = []
    for name in [given] if isinstance(given, str) else given:
        if name in _UNKNOWN_HERE:
            keys.plan_only(f"the tracker {name} is planned", key="trainer.logger", fix="leave it out")
        elif name == "tracking" or name in TRACKERS.names():
            names.append("wandb" if name == "tracking" else name)
        elif name != "file":  # metrics.jsonl is written in any case
            _own_tracker(keys, name)
    older = get(keys, "trainer.val_generations_to_log_to_wandb", 0)
    shown = get(keys, "trainer.log_val_generations", 0) or older or 0
    if shown < 0:  # verl slices its list by the number
        keys.warn(f"trainer.log_val_generations={shown}: all validation responses are shown (verl leaves {-shown} out)")
        shown = _ALL_SHOWN
    return tracking(names, "verl") | {"tracking.validation_samples": shown}


def _own_tracker(keys: Reader, name: str) -> None:
    """Leave a tracker of the user's own out with --drop-unknown, and reject it, like a misspelt one, without."""
    known = sorted({*TRACKERS.names(), *_UNKNOWN_HERE, "file", "tracking"})
    near = nearest(name, known)
    if keys.drops and not (near and looks_misspelt(name, near)):
        keys.warn(f"trainer.logger: {name} is a tracker of yours, not verl's, and is dropped (--drop-unknown)")
        return
    what = f"there is no tracker called {name!r} (known: {', '.join(known)})"
    fix = "--drop-unknown leaves out a tracker of your own"
    fix = f"did you mean {near}? If not, {fix}" if near else f"leave it out; {fix}"
    keys.problem(what, key="trainer.logger", fix=fix)


def resume(keys: Reader) -> dict[str, Any]:
    """Return the settings of resuming."""
    mode, path = keys["trainer.resume_mode"], keys["trainer.resume_from_path"]
    key = "trainer.resume_mode"
    if mode == "disabled":
        keys.warn(f"{key}={mode} is read as disable; verl itself would look for a checkpoint, and end without one")
        mode = "disable"
    if mode in ("auto", "disable"):
        keys.ignore("trainer.resume_from_path", f"{key} is {mode}, not resume_path")
        return {"run.resume": "auto" if mode == "auto" else "never"}
    if mode != "resume_path":
        names_a_step = "global_step_" in mode
        if names_a_step and keys.ledger.version != "0.2":
            keys.warn(f"{key}={mode} is read as the path to resume from, as verl 0.2 spells it")
        if not names_a_step and keys.ledger.version != "0.2":
            what = f"{key} must be auto, disable or resume_path, not {mode!r}"
            near = nearest(mode, ("auto", "disable", "resume_path"))
            path_fix = "a path stands in trainer.resume_from_path, with resume_mode=resume_path"
            keys.problem(what, key=key, fix=f"did you mean {near}?" if near else path_fix)
            return {}
        path = mode
    else:
        key = "trainer.resume_from_path"
    if not isinstance(path, str) or "global_step_" not in path:
        what = f"{key} names no checkpoint: {path!r} is no folder global_step_N"
        keys.problem(what, key=key, fix=f"use {key}=FOLDER/global_step_100, or trainer.resume_mode=auto")
        return {}
    return {"run.resume": "auto", "run.resume_path": path}


def contents(keys: Reader, at: str = f"{ACTOR}.checkpoint") -> dict[str, Any]:
    """Return the contents of checkpoints, and the parts that are restored."""
    both = get(keys, f"{at}.contents")
    if not keys.ledger.find(f"{at}.save_contents"):
        return {}
    saved = both or keys[f"{at}.save_contents"] or ["model", "optimizer", "extra"]
    loaded = both or keys[f"{at}.load_contents"] or saved
    for name, listed in (("save_contents", saved), ("load_contents", loaded)):
        if unknown := [one for one in listed if one not in ("model", "optimizer", "extra", "hf_model")]:
            fix = "choose from model, optimizer, extra, hf_model"
            keys.problem(f"{at}.{name} does not know {unknown[0]}", key=f"{at}.{name}", fix=fix)
        elif not {"model", "hf_model"} & set(listed):
            what = f"{at}.{name} leaves the model out, and a run cannot resume without its weights"
            keys.problem(what, key=f"{at}.{name}", fix="add model")
    return {
        "checkpoint.save_optimizer": "optimizer" in saved,
        "checkpoint.load_optimizer": "optimizer" in loaded,
        "checkpoint.load_schedule": "extra" in loaded,
    }
