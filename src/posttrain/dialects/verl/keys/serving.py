"""Keys of actor_rollout_ref.rollout that later versions have about the sampler: its copies, its weights, what is told of it."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned
from posttrain.dialects.verl.keys.words import ROLLOUT, TRACES

_COPIES = "copies of a sampler that share experts or a schedule; devices / tensor_model_parallel_size copies work by themselves"
_QUANTIZED = "samplers with quantized weights"
_AHEAD = "heads for several tokens ahead"
_BY_ENGINE = "it changes memory and speed only; engine_kwargs hands the engine any argument of its own"


def _unread(name: str, type: Any, reason: str, meaning: str) -> Key:
    return ignored(f"{ROLLOUT}.{name}", type, ABSENT, reason, meaning, since="later")


_ENGINE: tuple[Key, ...] = (
    mapped(
        f"{ROLLOUT}.enable_prefix_caching",
        bool,
        ABSENT,
        "rollout.engine_options.enable_prefix_caching",
        "keep the cache of shared prompt beginnings",
        since="later",
    ),
    mapped(
        f"{ROLLOUT}.pipeline_model_parallel_size",
        int,
        ABSENT,
        "rollout.engine_options.pipeline_parallel_size",
        "devices that share the layers of one copy of the sampler",
        since="later",
    ),
    planned(f"{ROLLOUT}.data_parallel_size", int, ABSENT, _COPIES, "copies in one engine", off=(1,), since="later"),
    planned(f"{ROLLOUT}.expert_parallel_size", int, ABSENT, _COPIES, "share out experts", off=(1,), since="later"),
    planned(f"{ROLLOUT}.quantization", str | None, ABSENT, _QUANTIZED, "kind of quantization", since="later"),
    planned(f"{ROLLOUT}.quantization_config_file", str | None, ABSENT, _QUANTIZED, "its settings", since="later"),
    planned(f"{ROLLOUT}.mtp.enable", bool, ABSENT, _AHEAD, "sample ahead", off=(False,), since="later"),
    _unread("mtp.**", Any, "only mtp.enable (planned) reads it", "its settings"),
    planned(
        f"{ROLLOUT}.enable_rollout_routing_replay",
        bool,
        ABSENT,
        "mixtures of experts",
        "record the experts chosen while sampling",
        off=(False,),
        since="later",
    ),
    planned(
        f"{ROLLOUT}.over_sample_rate",
        int | float,
        ABSENT,
        "further responses, of which the slowest are dropped",
        "share of further prompts",
        off=(0,),
        since="later",
    ),
    planned(f"{ROLLOUT}.custom", dict | None, ABSENT, "extensions of your own", "what they read", since="later"),
    _unread(
        "logprobs_mode", str, "log-probs are always those of the distribution sampled from", "of which distribution"
    ),
    _unread("cudagraph_capture_sizes", list[int] | None, _BY_ENGINE, "sizes that CUDA graphs are made for"),
    _unread("scheduling_policy", str, _BY_ENGINE, "in which order requests are taken"),
    _unread("enable_sleep_mode", bool, "free_cache_engine says whether memory is given back", "let vLLM sleep"),
    _unread("skip_tokenizer_init", bool, "the sampler is given ids and gives ids", "start without a tokenizer"),
    _unread("layer_name_map.**", Any, "weights travel by their Hugging Face names", "names of layers"),
    _unread("layer_name_map", dict, "weights travel by their Hugging Face names", "names of layers"),
    _unread("server.**", Any, "posttrain.rollout.timeout_s and retries say it of all servers", "requests to servers"),
)

_WEIGHTS: tuple[Key, ...] = (
    mapped(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        int,
        ABSENT,
        "rollout.weight_bucket_mib",
        "the later name of update_weights_bucket_megabytes, which it goes before",
        since="later",
    ),
    ignored(
        f"{ROLLOUT}.checkpoint_engine.**",
        Any,
        ABSENT,
        "where the sampler is says how weights get there; posttrain.rollout.weight_sync names another way",
        "how weights travel: naive, nccl and others",
        since="later",
    ),
    planned(f"{ROLLOUT}.trace.backend", str | None, ABSENT, TRACES, "mlflow or weave: where traces go", since="later"),
    ignored(f"{ROLLOUT}.trace.**", Any, ABSENT, "only trace.backend (planned) reads it", "traces", since="later"),
    planned(
        f"{ROLLOUT}.prometheus.enable",
        bool,
        ABSENT,
        TRACES,
        "metrics of the servers",
        off=(False,),
        since="later",
        cluster=True,
    ),
    ignored(
        f"{ROLLOUT}.prometheus.**", Any, ABSENT, "only prometheus.enable (planned) reads it", "where to", since="later"
    ),
    planned(f"{ROLLOUT}.skip_rollout", bool, ABSENT, "replayed responses", "reuse", off=(False,), since="later"),
    ignored(
        f"{ROLLOUT}.skip_dump_dir",
        str | None,
        ABSENT,
        "only skip_rollout (planned) reads it",
        "where from",
        since="later",
    ),
)

ROWS: tuple[Key, ...] = (*_ENGINE, *_WEIGHTS)
