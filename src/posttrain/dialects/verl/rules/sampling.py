"""Sampling, in training and in validation, and the settings of the sampler."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.converters import CONVERTERS
from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get, names_a_later_key
from posttrain.dialects.verl.rules.names import MODEL, ROLLOUT
from posttrain.dialects.versions import checkout_version

# Sections that say whose responses are kept, the later ones first.
_SPLITS = ("tensor_parallel_size", "tp_size")  # verl gives a sampler so many devices as its own key says
_N_VAL, _VAL_TEMPERATURE = f"{ROLLOUT}.n_val", f"{ROLLOUT}.val_temperature"  # of forks
_SKIPS = ("skip.async_rollout", "skip.rollout_tq", "skip.rollout", f"{ROLLOUT}.skip")
# Arguments of the sampler that verl gives itself. Its servers let engine_kwargs replace them; mode sync has them twice.
BEFORE_SERVERS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6")  # versions whose samplers may be in the trainer's processes
_GIVEN = {
    "dtype": "dtype",
    "enforce_eager": "enforce_eager",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "load_format": "load_format",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "disable_log_stats": "disable_log_stats",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "mem_fraction_static": "gpu_memory_utilization",
    "tp_size": "tensor_model_parallel_size",
}


def name_of_engine(keys: Reader) -> None:
    """Let all rules that follow read the name of a sampler that exists here."""
    key = f"{ROLLOUT}.name"
    if keys[key] == "sglang_async":
        keys.put(key, "sglang")
    elif keys[key] == "trtllm":
        if not keys.here:
            keys.warn(
                f"{key}=trtllm: there is no sampler of TensorRT-LLM here; vLLM samples, from the same distribution"
            )
        keys.put(key, "vllm")
        if (
            get(keys, f"{ROLLOUT}.expert_parallel_size", 1) > 1
        ):  # a part of the devices that split a layer, unlike vLLM's
            keys.put(f"{ROLLOUT}.expert_parallel_size", 1)
            keys.ignore(f"{ROLLOUT}.expert_parallel_size", "there is no sampler of TensorRT-LLM here")


def sampling(keys: Reader) -> dict[str, Any]:
    """Lengths, seed, validation and engine settings."""
    engine = keys[f"{ROLLOUT}.name"]
    fields: dict[str, Any] = {"rollout.max_response_tokens": keys[f"{ROLLOUT}.response_length"]}
    if keys[f"{ROLLOUT}.seed"] is not None:
        fields |= {"run.seed": keys[f"{ROLLOUT}.seed"], "data.seed": 1}
    if engine == "hf" and not keys[f"{ROLLOUT}.do_sample"]:
        what = "greedy responses of a prompt are all the same, and teach nothing"
        keys.problem(what, key=f"{ROLLOUT}.do_sample", fix=f"use {ROLLOUT}.do_sample=True")
    _check_engine(keys, engine)
    fields |= first_token(keys, ROLLOUT) | _replayed(keys)
    return fields | concurrency(keys, ROLLOUT, engine) | _validation(keys) | _engine_kwargs(keys, engine)


def _replayed(keys: Reader) -> dict[str, Any]:
    """The folder of kept responses, where verl has a file of that name."""
    for section in _SKIPS:
        if not get(keys, f"{section}.enable", False):
            for name in ("dump_dir", "steps"):
                keys.ignore(f"{section}.{name}", f"{section}.enable is false")
            continue
        steps = None if section == f"{ROLLOUT}.skip" else get(keys, f"{section}.steps", [])
        return _skipped(keys, get(keys, f"{section}.dump_dir", "~/.verl/rollout_dump"), steps)
    place = f"{ROLLOUT}.skip_dump_dir"
    if not get(keys, f"{ROLLOUT}.skip_rollout", False):
        keys.ignore(place, "skip_rollout is false")
        return {}
    prompts = get(keys, "data.gen_batch_size", keys["data.train_batch_size"])
    name = f"__GBS{prompts}__N{keys[f'{ROLLOUT}.n']}"
    return {"rollout.replay_folder": f"{str(get(keys, place, '/tmp/rollout_dump')).rstrip('/')}/{name}"}


def _skipped(keys: Reader, place: str, steps: list[int] | None) -> dict[str, Any]:
    """Return the folder of verl 0.8 and later, and the steps that it is for; None: all."""
    prompts = get(keys, "data.gen_batch_size", keys["data.train_batch_size"])
    sizes = f"GBS{prompts}_N{keys[f'{ROLLOUT}.n']}"
    sizes += f"_in{keys['data.max_prompt_length']}_out{keys['data.max_response_length']}"
    run = f"{keys['trainer.experiment_name']}_{keys['trainer.project_name']}"
    fields: dict[str, Any] = {"rollout.replay_folder": f"{place.rstrip('/')}/{run}/{sizes}"}
    return fields if steps is None else fields | {"rollout.replay_steps": steps}


def first_token(keys: Reader, section: str) -> dict[str, Any]:
    """FIRE: the first token at temperature 30, among the 16 most likely, as verl's rollout has them."""
    if not get(keys, f"{section}.use_fire_sampling", False):
        return {}
    among = CONVERTERS["minus_one_is_zero"](get(keys, f"{section}.top_k", 0)) or 16
    return {"rollout.first_token_temperature": 30.0, "rollout.first_token_top_k": among}


def concurrency(keys: Reader, section: str, engine: str) -> dict[str, Any]:
    """Sequences decoded concurrently: verl's default is a server's, and makes other engines take memory for 1024."""
    key = f"{section}.max_num_seqs"
    if engine in ("vllm", "sglang") or keys.written(key):
        return {"rollout.max_concurrent_sequences": keys[key]}
    return {}


def _validation(keys: Reader) -> dict[str, Any]:
    section = f"{ROLLOUT}.val_kwargs"
    if not get(keys, f"{section}.do_sample", False):
        if get(keys, _VAL_TEMPERATURE):
            return {"validation.temperature": keys[_VAL_TEMPERATURE]} | _samples(keys)
        for name in ("temperature", "top_p", "top_k"):
            keys.ignore(f"{section}.{name}", "validation is greedy: val_kwargs.do_sample is false")
        return {"validation.temperature": 0.0} | _samples(keys)
    keys.ignore(_VAL_TEMPERATURE, f"{section}.temperature counts")
    fields = {
        "validation.temperature": keys[f"{section}.temperature"],
        "validation.top_p": keys[f"{section}.top_p"],
        "validation.top_k": CONVERTERS["minus_one_is_zero"](keys[f"{section}.top_k"]),
    } | _samples(keys)
    return fields | ({"validation.min_p": keys[f"{ROLLOUT}.min_p"]} if keys[f"{ROLLOUT}.min_p"] is not None else {})


def _samples(keys: Reader) -> dict[str, Any]:
    """Return the responses to a prompt of the validation where a fork's key gives them, and verl's own does not."""
    verls = f"{ROLLOUT}.val_kwargs.n"
    if get(keys, _N_VAL) is None:
        return {}
    if get(keys, verls, 1) != 1:
        keys.ignore(_N_VAL, f"{verls} counts")
        return {}
    return {"validation.samples_per_prompt": keys[_N_VAL]}


def _engine_kwargs(keys: Reader, engine: str) -> dict[str, Any]:
    """Return the entries of engine_kwargs.vllm or .sglang, for the chosen engine; nulls are left out."""
    for other in {"vllm", "sglang"} - {engine}:
        keys.ignore(f"{ROLLOUT}.engine_kwargs.{other}", f"rollout.name is {engine}")
    options: dict[str, Any] = {}
    for name, value in keys.section(f"{ROLLOUT}.engine_kwargs.{engine}").items():
        key = f"{ROLLOUT}.engine_kwargs.{engine}.{name}"
        if name in _GIVEN and (name in _SPLITS or not _has_servers(keys)):
            what = f"{key} gives the sampler an argument that {ROLLOUT}.{_GIVEN[name]} gives it already"
            keys.problem(what, key=key, fix=f"remove it, and use {ROLLOUT}.{_GIVEN[name]}")
        elif value is not None:
            options[f"rollout.engine_options.{name}"] = value
    return options


def _has_servers(keys: Reader) -> bool:
    """Return True where samplers are servers: with mode async, the only one from verl 0.7 on, whose keys, or
    whose checkout in the current folder, may show the version."""
    checkout = checkout_version()
    later = checkout not in ("", *BEFORE_SERVERS)
    return later or get(keys, f"{ROLLOUT}.mode", "sync") == "async" or names_a_later_key(keys)


def _check_engine(keys: Reader, engine: str) -> None:
    summon = f"{ROLLOUT}.layered_summon"
    has_adapter = get(keys, f"{MODEL}.lora_rank", 0) > 0 or get(keys, f"{MODEL}.lora.rank", 0) > 0
    if has_adapter and get(keys, summon, False) and keys[f"{ROLLOUT}.load_format"].startswith("dummy"):
        what = f"layered_summon needs weights that the sampler loads itself, and load_format is {keys[f'{ROLLOUT}.load_format']}"
        keys.problem(what, key=summon, fix=f"use {ROLLOUT}.load_format=safetensors, or {summon}=False")
    longest = get(keys, f"{ROLLOUT}.max_model_len", keys["data.max_prompt_length"] + keys[f"{ROLLOUT}.response_length"])
    key = f"{ROLLOUT}.max_num_batched_tokens"
    # verl's servers leave this to vLLM, which then prefills in pieces.
    checks = keys.ledger.version not in ("0.1", "0.2") and not _has_servers(keys)
    if checks and engine == "vllm" and keys[f"{ROLLOUT}.enable_chunked_prefill"] and keys[key] < longest:
        what = f"with enable_chunked_prefill, {keys[key]} tokens in one pass are fewer than the {longest} of the longest sequence"
        if keys.own:
            # A fork of a verl that may be older than this check; vLLM itself prefills a longer prompt in several passes.
            keys.warn(
                f"{key}: {what}; verl {keys.ledger.version} refuses that, and a launch with keys of its own may not"
            )
        else:
            keys.problem(what, key=key, fix=f"use {key}={longest}, or {ROLLOUT}.enable_chunked_prefill=False")
