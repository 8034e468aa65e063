"""Keys of actor_rollout_ref.rollout: how responses are sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned
from posttrain.dialects.verl.keys.shared import profiler_rows
from posttrain.dialects.verl.keys.words import ACTOR, ROLLOUT


def off_is_zero(value: int | None) -> int | None:
    """verl writes -1 where nothing is left out; we write 0."""
    return 0 if value == -1 else value


_SAMPLING: tuple[Key, ...] = (
    mapped(
        f"{ROLLOUT}.name",
        Literal["vllm", "sglang", "hf", "native"],
        "vllm",
        "rollout.engine",
        "sampler; native, which verl does not have, samples from the weights being trained",
    ),
    mapped(f"{ROLLOUT}.n", int, 1, "rollout.samples_per_prompt", "responses per prompt"),
    mapped(
        f"{ROLLOUT}.temperature",
        float,
        1.0,
        "rollout.temperature",
        "divides the logits, in sampling and in every log-prob",
    ),
    mapped(
        f"{ROLLOUT}.top_k",
        int,
        -1,
        "rollout.top_k",
        "keep the k most likely tokens; -1: all",
        to=off_is_zero,
        change="-1: 0",
    ),
    mapped(f"{ROLLOUT}.top_p", float, 1, "rollout.top_p", "keep the most likely tokens up to this probability"),
    mapped(
        f"{ROLLOUT}.min_p",
        float,
        ABSENT,
        "rollout.min_p",
        "drop tokens below this share of the most likely one",
        note="Names of vLLM's sampling parameters may stand in this section with a + in verl; these are the ones read here.",
    ),
    mapped(
        f"{ROLLOUT}.stop",
        list[str] | str | None,
        ABSENT,
        "rollout.stop validation.stop",
        "texts that end a response",
        to=lambda value: [value] if isinstance(value, str) else value or [],
    ),
    mapped(
        f"{ROLLOUT}.stop_token_ids",
        list[int] | None,
        ABSENT,
        "rollout.stop_token_ids validation.stop_token_ids",
        "tokens that end a response",
        to=lambda value: value or [],
    ),
    mapped(
        f"{ROLLOUT}.ignore_eos",
        bool,
        False,
        "rollout.ignore_eos validation.ignore_eos",
        "go on after the end token",
        note="verl trains only up to the first end token even so; here on all that was sampled.",
    ),
    mapped(
        f"{ROLLOUT}.seed",
        int,
        ABSENT,
        "run.seed",
        "seed of sampling",
        by_rule=True,
        change="also of everything else that is random, but for the order of the data (data.seed)",
    ),
    mapped(
        f"{ROLLOUT}.response_length",
        int,
        "${data.max_response_length}",
        "rollout.max_response_tokens",
        "longest response, tokens",
        by_rule=True,
    ),
    ignored(
        f"{ROLLOUT}.prompt_length",
        int,
        "${data.max_prompt_length}",
        "prompts are cut or left out by data.max_prompt_length",
        "longest prompt, tokens",
    ),
    ignored(
        f"{ROLLOUT}.do_sample",
        bool,
        True,
        "training always samples, as it does with verl's vllm and sglang whatever this says",
        "sample instead of taking the most likely token",
        note="Only verl's hf rollout reads it, and greedy responses teach nothing: false with name=hf is refused.",
    ),
    planned(
        f"{ROLLOUT}.use_fire_sampling",
        bool,
        False,
        "a first token at a high temperature",
        "FIRE sampling",
        since="0.4",
    ),
    ignored(
        f"{ROLLOUT}.calculate_log_probs",
        bool,
        False,
        "the sampler's log-probs are always kept and compared",
        "keep the sampler's log-probs",
        since="0.4",
    ),
)


def _engine_sampling(name: str, type: Any, meaning: str) -> Key:
    fields = f"rollout.engine_sampling.{name} validation.engine_sampling.{name}"
    return mapped(f"{ROLLOUT}.{name}", type, ABSENT, fields, meaning)


_ENGINE_SAMPLING: tuple[Key, ...] = (
    _engine_sampling("repetition_penalty", float, "makes tokens that are there already less likely"),
    _engine_sampling("presence_penalty", float, "the same, once per token"),
    _engine_sampling("frequency_penalty", float, "the same, by how often"),
    _engine_sampling("min_tokens", int, "shortest response, tokens"),
    _engine_sampling("bad_words", list[str] | None, "texts that are never sampled"),
    _engine_sampling("allowed_token_ids", list[int] | None, "the only tokens that are sampled"),
    _engine_sampling("include_stop_str_in_output", bool, "keep the stop text"),
    _engine_sampling("skip_special_tokens", bool, "leave special tokens out of the text"),
    _engine_sampling("spaces_between_special_tokens", bool, "how special tokens are written"),
    _engine_sampling("truncate_prompt_tokens", int | None, "cut prompts in the sampler"),
)


def _engine(name: str, type: Any, default: Any, meaning: str, **more: Any) -> Key:
    return mapped(f"{ROLLOUT}.{name}", type, default, f"rollout.engine_options.{name}", meaning, **more)


_ENGINE: tuple[Key, ...] = (
    mapped(
        f"{ROLLOUT}.tensor_model_parallel_size",
        int,
        2,
        "rollout.tensor_parallel",
        "devices that share one copy of the sampler",
        by_rule=True,
        change="1 with hf and native, which do not split",
    ),
    _engine("dtype", str, "bfloat16", "precision of the sampler"),
    _engine(
        "gpu_memory_utilization",
        float,
        0.5,
        "share of device memory for the sampler (vllm), or for its weights and cache (sglang)",
    ),
    _engine("enforce_eager", bool, True, "no CUDA graphs"),
    _engine(
        "free_cache_engine",
        bool,
        True,
        "release the sampler's memory while training",
        note="verl 0.2 asks for enforce_eager with it; later versions and this program do not.",
    ),
    _engine("load_format", str, "dummy_dtensor", "how the sampler gets its first weights; dummy...: from the trainer"),
    _engine("max_num_batched_tokens", int, 8192, "tokens in one pass of the sampler"),
    _engine(
        "max_num_seqs",
        int,
        1024,
        "sequences decoded side by side",
        note="verl 0.4 does not hand it to the sampler; later versions do, and so does this program.",
    ),
    _engine("max_model_len", int | None, None, "longest prompt and response together; null: both limits", since="0.4"),
    _engine("enable_chunked_prefill", bool, True, "prefill in pieces"),
    _engine("disable_log_stats", bool, True, "no statistics of the sampler in the log"),
    _engine("layered_summon", bool, False, "gather weights layer by layer", since="0.4"),
    _engine("multi_stage_wake_up", bool, False, "sglang: wake weights and cache one after the other", since="0.4"),
    _engine("limit_images", int | None, None, "images per prompt", since="0.4"),
    mapped(
        f"{ROLLOUT}.update_weights_bucket_megabytes",
        int,
        ABSENT,
        "rollout.weight_bucket_mib",
        "MiB sent at once in a weight sync",
        since="later",
    ),
    mapped(
        f"{ROLLOUT}.engine_kwargs.vllm.swap_space",
        int | float | None,
        None,
        "rollout.engine_options.swap_space",
        "GB of swap space; null: vllm's own default",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        f"{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache",
        bool | None,
        False,
        "rollout.engine_options.disable_mm_preprocessor_cache",
        "no cache of preprocessed images",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        f"{ROLLOUT}.engine_kwargs.vllm.**",
        Any,
        ABSENT,
        "rollout.engine_options",
        "any argument of vllm's engine; null leaves vllm's default",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        f"{ROLLOUT}.engine_kwargs.sglang.attention_backend",
        str | None,
        None,
        "rollout.engine_options.attention_backend",
        "attention kernel; null: sglang's own default",
        by_rule=True,
        since="0.4",
        note="verl 0.4 does not hand it on.",
    ),
    mapped(
        f"{ROLLOUT}.engine_kwargs.sglang.**",
        Any,
        ABSENT,
        "rollout.engine_options",
        "any argument of sglang's engine; null leaves sglang's default",
        by_rule=True,
        since="0.4",
    ),
    *profiler_rows(ROLLOUT),
    mapped(
        f"{ROLLOUT}.nnodes",
        int,
        ABSENT,
        "rollout.devices placement.devices",
        "machines of its own, beside the trainer's; 0 shares the trainer's",
        by_rule=True,
        change="x n_gpus_per_node = its devices",
        since="later",
    ),
    mapped(
        f"{ROLLOUT}.n_gpus_per_node",
        int,
        ABSENT,
        "rollout.devices placement.devices",
        "its devices of each of them",
        by_rule=True,
        change="x nnodes = its devices",
        since="later",
    ),
)

_LOG_PROBS: tuple[Key, ...] = (
    mapped(
        f"{ROLLOUT}.log_prob_micro_batch_size",
        int | None,
        None,
        "reference.sequences_per_micro_batch_per_device",
        "deprecated: sequences per pass of the actor's old log-probs, on all devices together",
        by_rule=True,
        change="sequences on all devices / data-parallel size = sequences per device",
    ),
    mapped(
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        int | None,
        None,
        "reference.sequences_per_micro_batch_per_device",
        "sequences per pass of the actor's old log-probs, on one device",
        by_rule=True,
        change="one size with the reference's: the smaller of the two",
        note="verl's page shows 16; its file says null, so one of the two sizes must be given.",
    ),
    mapped(
        f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        bool,
        f"${{{ACTOR}.use_dynamic_bsz}}",
        "reference.max_tokens_per_micro_batch",
        "cut these passes by tokens",
        by_rule=True,
    ),
    mapped(
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        int,
        f"${{{ACTOR}.ppo_max_token_len_per_gpu}}",
        "reference.max_tokens_per_micro_batch",
        "tokens per pass and device",
        by_rule=True,
    ),
)


def _validation(
    name: str,
    type: Any,
    default: Any,
    fields: str,
    meaning: str,
    *,
    to: Callable[[Any], Any] | None = None,
    change: str = "",
    by_rule: bool = True,
) -> Key:
    return mapped(
        f"{ROLLOUT}.val_kwargs.{name}",
        type,
        default,
        fields,
        meaning,
        to=to,
        change=change,
        by_rule=by_rule,
        since="0.4",
    )


_GREEDY = "with do_sample only; without, validation is greedy"

_VALIDATION: tuple[Key, ...] = (
    _validation("n", int, 1, "validation.samples_per_prompt", "responses per validation prompt", by_rule=False),
    _validation("do_sample", bool, False, "validation.temperature", "sample", change="false: temperature 0"),
    _validation("temperature", float, 0, "validation.temperature", "divides the logits", change=_GREEDY),
    _validation("top_p", float, 1.0, "validation.top_p", "keep the most likely tokens up to this", change=_GREEDY),
    _validation("top_k", int, -1, "validation.top_k", "keep the k most likely tokens; -1: all", change=_GREEDY),
)

ROWS: tuple[Key, ...] = (*_SAMPLING, *_ENGINE_SAMPLING, *_ENGINE, *_LOG_PROBS, *_VALIDATION)
