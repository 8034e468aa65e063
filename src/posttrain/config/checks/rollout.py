"""Rules about the sampler: which settings go together, and which have no effect. Nothing here looks for a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from posttrain.config import RunConfig
from posttrain.config.checks.engine_numbers import OPTIONS, SAMPLING, number_problems
from posttrain.config.roles import VLLM_LARGEST_RANK, holds_a_copy, runtime_of, sends_adapter, shares_weights
from posttrain.config.rollout import RolloutConfig, SamplingConfig
from posttrain.errors import Problem
from posttrain.registry import ROLLOUT_ENGINES, is_installed, missing_library

_WEIGHTS = "rollout.weights"
SHARES_OF_MEMORY = ("gpu_memory_utilization", "mem_fraction_static")
# Options that count also for servers that run already; all others are about their start.
OF_RUNNING_SERVERS = (
    "api_key_env",
    "free_cache_engine",
    "sleep_level",
    "weight_sync_backend",
    "pipeline_parallel_size",
    "inference_engine_pipeline_parallel_size",
)


def rollout_problems(config: RunConfig, *, apart: bool = False, with_workers: bool = False) -> Iterator[Problem]:
    """Yield what is wrong with the sampler of a run that trains. Args: as ``sampler_problems``."""
    rollout = config.rollout
    yield from sampler_problems(rollout, apart=apart, with_workers=with_workers)
    if rollout.engine == "http" and not (rollout.engine_options.get("update_path") or _own_server(rollout)):
        yield Problem(
            "rollout.engine=http trains only with servers that take new weights",
            fix="name their address for it (rollout.engine_options.update_path), or use vllm or sglang with rollout.endpoints",
            field="rollout.engine",
        )
    if rollout.engine == "vllm" and rollout.weight_sync == "adapter":
        if config.policy.lora is None:
            what = "rollout.weight_sync=adapter sends an adapter, and the policy has none"
            yield Problem(what, fix="use rollout.weight_sync=auto, or policy.lora", field="rollout.weight_sync")
        elif config.policy.lora.quantize is not None:
            what = (
                "rollout.weight_sync=adapter puts the adapter on vLLM's own base, and the policy's is rounded to 4 bits"
            )
            yield Problem(what, fix="use rollout.weight_sync=disk, which merges it", field="rollout.weight_sync")
        elif config.policy.lora.rank > VLLM_LARGEST_RANK:
            what = (
                f"vLLM takes adapters up to rank {VLLM_LARGEST_RANK}, and policy.lora.rank is {config.policy.lora.rank}"
            )
            yield Problem(what, fix="use rollout.weight_sync=disk, which merges it", field="rollout.weight_sync")
    if rollout.weights == "int8" and config.distillation.alone and config.distillation.enters == "loss":
        what = (
            f"{_WEIGHTS}=int8 samples from rounded weights, and the divergence from teachers, which is the whole loss, takes no "
            "correction for that"
        )
        fix = f"use {_WEIGHTS}=compute_dtype, or distillation.enters=advantage, whose loss is corrected"
        yield Problem(what, fix=fix, field=_WEIGHTS)
    for section, sampling in (("rollout", config.rollout), ("validation", config.validation)):
        yield from _logprob_problems(rollout, sampling, section)
    yield from number_problems(config.validation.engine_sampling, SAMPLING, "validation.engine_sampling")
    yield from _replay_problems(config)
    hot = {"temperature": rollout.temperature, "first_token_temperature": rollout.first_token_temperature}
    temperatures = {f"rollout.{name}": value for name, value in hot.items()}
    yield from _temperature_problems(
        rollout.engine, temperatures | {"validation.temperature": config.validation.temperature}
    )


def _replay_problems(config: RunConfig) -> Iterator[Problem]:
    field = "rollout.replay_folder"
    if config.rollout.replay_folder is None:
        if config.rollout.replay_steps is not None:
            what = "rollout.replay_steps names steps of a folder, and rollout.replay_folder is null"
            yield Problem(what, fix="name the folder, or leave replay_steps out", field="rollout.replay_steps")
        return
    for clashes, other in (
        (config.environment.used, "episodes of an environment"),
        (config.rollout.routing_replay, "the experts of each token (rollout.routing_replay)"),
    ):
        if clashes:
            yield Problem(f"{field} keeps single-turn responses, not {other}", fix=f"use {field}=null", field=field)
    if config.asynchronous.mode not in ("colocate", "separate"):
        return
    # A group is found again by its number in the order of admission
    for clashes, other in (
        (config.asynchronous.on_stale == "drop", "asynchronous.on_stale=drop, which samples dropped prompts again"),
        (bool(config.data.domains), "data.domains, whose prompts are admitted as those of each are trained"),
    ):
        if clashes:
            what = f"{field} needs groups in the same order in every run, which they have not with {other}"
            yield Problem(what, fix=f"use {field}=null", field=field)


def _temperature_problems(engine: str, temperatures: Mapping[str, float | None]) -> Iterator[Problem]:
    most = ROLLOUT_ENGINES.facts(engine).most_temperature
    for field, value in temperatures.items():
        if most is not None and value is not None and value > most:
            what = f"{engine} takes temperatures of at most {most:g}, and {field} is {value:g}"
            yield Problem(what, fix=f"use {field}={most:g}, or rollout.engine=native", field=field)


def sampler_problems(rollout: RolloutConfig, *, apart: bool = False, with_workers: bool = False) -> Iterator[Problem]:
    """Report the problems of a sampler, also of a run that trains nothing. ``apart``: it has devices of its own;
    ``with_workers``: its servers are started by workers of Ray."""
    engine, sync = rollout.engine, rollout.weight_sync
    if rollout.weights != "compute_dtype" and not ROLLOUT_ENGINES.facts(engine).rounds_weights:
        able = ", ".join(ROLLOUT_ENGINES.stating("rounds_weights"))
        what = f"rollout.engine={engine} samples with the weights that it is sent, and does not round them to {rollout.weights}"
        yield Problem(what, fix=f"use rollout.engine={able}, or {_WEIGHTS}=compute_dtype", field=_WEIGHTS)
    for name in SHARES_OF_MEMORY:
        share = rollout.engine_options.get(name)
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            what = f"{name} is the sampler's share of a device's memory: a number above 0 and at most 1, not {share}"
            yield Problem(what, fix="use 0.5, for example", field=f"rollout.engine_options.{name}")
    yield from number_problems(rollout.engine_options, OPTIONS, "rollout.engine_options")
    yield from number_problems(rollout.engine_sampling, SAMPLING, "rollout.engine_sampling")
    if engine == "http" and not rollout.endpoints and not _own_server(rollout):
        yield Problem("http needs servers", fix="rollout.endpoints=[http://host:8000]", field="rollout.endpoints")
    if engine == "http" and rollout.endpoints and _own_server(rollout):
        what = "rollout.engine_options.server is started by the run, and rollout.endpoints are servers that run already"
        yield Problem(what, fix="use one of them", field="rollout.endpoints")
    for url in rollout.endpoints:
        if urlsplit(url if "://" in url else f"http://{url}").scheme not in ("http", "https"):
            yield Problem(f"{url} is not the address of a server", fix="http://host:8000", field="rollout.endpoints")
    if shares_weights(rollout.engine) and not apart and sync in ("disk", "collective", "adapter", "shared_memory"):
        what = f"{engine} reads the trainer's own weights, so there is nothing to send by {sync}"
        yield Problem(what, fix="use rollout.weight_sync=auto", field="rollout.weight_sync")
    reaches = with_workers and not rollout.endpoints
    if holds_a_copy(engine) and (sync == "in_memory" or (sync == "shared_memory" and not reaches)):
        what = f"{engine} has a copy of the weights in another place, which {sync} cannot reach"
        yield Problem(what, fix="use rollout.weight_sync=disk", field="rollout.weight_sync")
    if sync == "collective" and (engine in ("sglang", "http") or len(rollout.endpoints) > 1):
        what = "collective sends weights to one vLLM server"
        yield Problem(what, fix="use rollout.weight_sync=disk", field="rollout.weight_sync")
    if sync == "adapter" and engine in ("sglang", "http"):
        what = f"{engine} is sent whole weights, with the adapter merged into them"
        yield Problem(what, fix="use rollout.weight_sync=disk", field="rollout.weight_sync")
    away = [url for url in rollout.endpoints if not _is_here(url)]
    if away and holds_a_copy(engine) and sync in ("auto", "disk", "adapter") and rollout.weight_folder is None:
        what = f"{away[0]} is on another machine, and weights go through a folder that it must see"
        fix = "name one (rollout.weight_folder=/shared/...)"
        if engine == "vllm" and len(rollout.endpoints) == 1 and sync != "adapter":
            fix += ", or send them without a folder (rollout.weight_sync=collective)"
        yield Problem(what, fix=fix, field="rollout.weight_folder")


def _own_server(rollout: RolloutConfig) -> bool:
    """Return True when http stands for a user's class, which the run starts."""
    return bool(rollout.engine_options.get("server"))


def _logprob_problems(rollout: RolloutConfig, sampling: SamplingConfig, section: str) -> Iterator[Problem]:
    plain = sampling.temperature in (0.0, 1.0) and sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0
    plain = plain and (section == "validation" or rollout.first_token_temperature is None)
    raw = rollout.engine_options.get("logprobs", "raw") != "processed" and not _own_server(rollout)
    if rollout.engine == "http" and not plain and raw:
        yield Problem(
            f"{section}: a server's log-probs of the raw logits are not those of the distribution sampled from with this "
            "temperature, top_k, top_p or min_p",
            fix="start it with --logprobs-mode processed_logprobs and set rollout.engine_options.logprobs=processed",
            field=f"{section}.temperature",
        )


def training_sampler_warnings(config: RunConfig) -> Iterator[str]:
    """``rollout_warnings``, and what has no effect where this sampler's policy is trained."""
    rollout, default = config.rollout, RolloutConfig()
    yield from rollout_warnings(rollout)
    if rollout.weights == "int8" and not config.loss.corrects_for_sampler:
        yield (
            f"{_WEIGHTS}=int8 samples from rounded weights, and the loss takes their responses for the policy's own: "
            "loss.rollout_correction.weights=token corrects for the gap"
        )
    if sends_adapter(rollout, config.policy.lora):
        if str(rollout.engine_options.get("load_format") or "").startswith("dummy"):
            yield (
                "rollout.engine_options.load_format=dummy has no effect: vllm is sent the adapter alone, so it reads the base "
                "weights from model.path (rollout.weight_sync=disk sends all weights, with the adapter merged)"
            )
        by_file = runtime_of(config.placement) == "inprocess" or rollout.endpoints
        if by_file and rollout.weight_bucket_mib != default.weight_bucket_mib:
            yield "rollout.weight_bucket_mib has no effect: vllm is sent the adapter alone, as one file"
    if rollout.weight_hash_every_steps and (config.placement.runtime == "ray" or config.placement.devices > 1):
        yield "rollout.weight_hash_every_steps has no effect on several devices: there, every sync compares hashes"


def rollout_warnings(rollout: RolloutConfig) -> Iterator[str]:
    """Report settings that have no effect with this sampler, and its deviations from the others."""
    engine = rollout.engine
    default = RolloutConfig()
    if shares_weights(rollout.engine):
        for name in ("endpoints", "timeout_s", "retries", "weight_folder", "weight_bucket_mib"):
            if getattr(rollout, name) != getattr(default, name):
                yield f"rollout.{name} has no effect: {engine} samples in this process from the trainer's own weights"
        if engine == "hf" and rollout.max_prefill_tokens != default.max_prefill_tokens:
            yield "rollout.max_prefill_tokens has no effect: model.generate takes a batch's prompts at once"
        if engine == "hf" and rollout.engine_options:
            yield f"rollout.engine_options has no effect with hf: {', '.join(rollout.engine_options)}"
    yield from _running_server_warnings(rollout)
    if rollout.first_token_temperature is None and rollout.first_token_top_k != default.first_token_top_k:
        yield "rollout.first_token_top_k has no effect: rollout.first_token_temperature is null"
    if rollout.weight_folder and rollout.weight_sync == "collective":
        yield "rollout.weight_folder has no effect: rollout.weight_sync=collective sends weights without a folder"
    hot_cut = rollout.first_token_temperature is not None and rollout.first_token_top_k
    if engine == "sglang" and (rollout.top_k or rollout.top_p < 1 or rollout.min_p or hot_cut):
        yield (
            "sglang reports log-probs from before top_k, top_p and min_p: rollout.* cuts make its log-probs those of another "
            "distribution than the one sampled from"
        )
    if (
        engine == "sglang"
        and not rollout.endpoints
        and not rollout.engine_options.get("enable_deterministic_inference")
    ):
        yield "sglang's samples are not reproducible without rollout.engine_options.enable_deterministic_inference=true"


def _running_server_warnings(rollout: RolloutConfig) -> Iterator[str]:
    """Report settings for the start of a server when rollout.endpoints names running servers."""
    if rollout.engine not in ("vllm", "sglang") or not rollout.endpoints:
        return
    why = "the servers of rollout.endpoints run already, with settings of their own"
    for name, value in rollout.engine_options.items():
        if name not in OF_RUNNING_SERVERS and value is not None:
            yield f"rollout.engine_options.{name} has no effect: {why}"
    default = RolloutConfig()
    # A broadcast counts the receivers.
    shares = () if rollout.weight_sync == "collective" else ("tensor_parallel",)
    for name in ("max_prefill_tokens", *shares):
        if getattr(rollout, name) != getattr(default, name):
            yield f"rollout.{name} has no effect: {why}"


def missing_sampler(rollout: RolloutConfig) -> list[Problem]:
    """The library that this sampler needs and this Python does not have: a plan can be made without it, and not a run."""
    engine, python = rollout.engine, rollout.engine_options.get("python")
    problems = []
    if engine in ("vllm", "sglang") and not rollout.endpoints and not python and not is_installed(engine):
        what = f"{engine} is not installed in this Python"
        fix = (
            f"name a Python that has it (rollout.engine_options.python), or servers that run already (rollout.endpoints), or "
            f"use native; or pip install 'posttrain[{engine}]'"
        )
        problems.append(Problem(what, fix=fix, field="rollout.engine", library=engine))
    speaks_http = engine in ("sglang", "http") or (engine == "vllm" and (rollout.endpoints or python))
    if speaks_http and not is_installed("httpx2"):
        problems.append(replace(missing_library("httpx2", f"rollout.engine={engine}"), field="rollout.engine"))
    return problems


def _is_here(url: str) -> bool:
    return urlsplit(url if "://" in url else f"http://{url}").hostname in ("127.0.0.1", "localhost", "::1")
