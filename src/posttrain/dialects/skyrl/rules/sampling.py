"""The sampler: its own options, sampling parameters, templates; and SkyRL's checks of the generator."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import get, is_of_2026, name_of
from posttrain.dialects.skyrl.rules.servers import addresses, servers
from posttrain.dialects.skyrl.templates import TEMPLATES
from posttrain.errors import did_you_mean

_OPTIONS = "rollout.engine_options"


def sampling(keys: Reader) -> dict[str, Any]:
    """Everything about sampling that several keys decide."""
    _check_engine(keys)
    fields = _lengths(keys) | _further_parameters(keys) | _template(keys) | _rope(keys)
    return fields | _engine_init(keys) | servers(keys)


def _lengths(keys: Reader) -> dict[str, Any]:
    """Check a, and the length of validation responses where it is another one."""
    prompt, longest, turns = (
        keys["trainer.max_prompt_length"],
        keys["generator.max_input_length"],
        keys["generator.max_turns"],
    )
    key = "generator.max_input_length"
    if turns < 1:
        what = f"generator.max_turns must be at least 1, not {turns}"
        keys.problem(what, key="generator.max_turns", fix="use generator.max_turns=1")
    elif turns == 1 and longest != prompt:
        what = f"with one turn the longest input is the longest prompt, and {key} is {longest}, not {prompt}"
        keys.problem(what, key=key, fix=f"use {key}={prompt}, or trainer.max_prompt_length={longest}")
    elif longest < prompt:
        what = f"the longest input of a turn ({key}={longest}) is shorter than the longest prompt of {prompt}"
        keys.problem(what, key=key, fix=f"use {key}={prompt}, or more")
    length = keys["generator.eval_sampling_params.max_generate_length"]
    same = length == keys["generator.sampling_params.max_generate_length"]
    return {} if same else {"validation.max_response_tokens": length}


def _further_parameters(keys: Reader) -> dict[str, Any]:
    """Sampling parameters that only some engines know."""
    fields: dict[str, Any] = {}
    for section, ours in (("sampling_params", "rollout"), ("eval_sampling_params", "validation")):
        name = f"generator.{section}"
        rows = {row.name.rpartition(".")[2] for row in keys.ledger.rows if row.name.startswith(f"{name}.")}
        penalty = get(keys, f"{name}.repetition_penalty")
        if penalty != 1:
            fields[f"{ours}.engine_sampling.repetition_penalty"] = penalty
        for parameter, value in keys.section(name).items():
            if parameter not in rows:
                fields[f"{ours}.engine_sampling.{parameter}"] = value
        _check_parameters(keys, name)
    return fields


def _check_parameters(keys: Reader, section: str) -> None:
    """Checks r and t: what SkyRL's engines cannot do."""
    logprobs, backend = get(keys, f"{section}.logprobs"), name_of(keys, "generator.backend")
    key = f"{section}.logprobs"
    if logprobs is not None:
        if logprobs not in (0, 1):  # since 2026 SkyRL takes 1 as 0
            what = f"{key} must be null, 0 or 1 (the sampled token's alone), not {logprobs}"
            keys.problem(what, key=key, fix=f"use {key}=0")
        if not keys["generator.batched"] and not is_of_2026(keys):
            what = f"{key} needs generator.batched=true in SkyRL, and it is false"
            keys.problem(what, key=key, fix=f"remove it (log-probs are kept here in any case), or use {key}=null")
        if addresses(keys):
            what = f"{key} needs samplers that run locally"
            keys.problem(what, key=key, fix=f"use {key}=null")
    if get(keys, "generator.backend") != "sglang":
        return
    if get(keys, f"{section}.stop"):
        what = f"SkyRL's sglang has no stop texts ({section}.stop)"
        keys.problem(what, key=f"{section}.stop", fix=f"use {backend}=vllm, or {section}.stop=null")
    if keys.section(section).get("min_new_tokens") is not None:
        key = f"{section}.min_new_tokens"
        keys.problem(f"SkyRL's sglang has no {key}", key=key, fix=f"use {backend}=vllm, or remove it")


def _check_engine(keys: Reader) -> None:
    """Checks c, d and r."""
    local, backend = not addresses(keys), get(keys, "generator.backend")
    if not get(keys, "generator.async_engine") and not keys["generator.batched"]:
        key = name_of(keys, "generator.async_engine")
        what = f"{key}=false takes all prompts in one call, and generator.batched is false"
        keys.problem(what, key=key, fix=f"use generator.batched=true, or {key}=true")
    if backend != "sglang":
        return
    tensor = get(keys, "generator.inference_engine_tensor_parallel_size")
    if local and tensor != 1:
        key = name_of(keys, "generator.inference_engine_tensor_parallel_size")
        what = f"SkyRL runs sglang locally on one device per copy, not on {tensor}"
        keys.problem(what, key=key, fix=f"use {key}=1")
    conversation = "generator.use_conversation_multi_turn"
    if keys.written(conversation) and not keys[conversation]:
        what = f"SkyRL's sglang continues conversations by messages only, and {conversation} is false"
        keys.problem(what, key=conversation, fix=f"use {conversation}=true")


def _template(keys: Reader) -> dict[str, Any]:
    """The chat template and its variables."""
    fields: dict[str, Any] = {}
    path, source = get(keys, "generator.chat_template.name_or_path"), get(keys, "generator.chat_template.source")
    if path is not None and source == "file":
        fields["model.chat_template_file"] = path
    elif path in TEMPLATES:
        fields["model.chat_template"] = TEMPLATES[path]
    elif path is not None:
        key, known = "generator.chat_template.name_or_path", list(TEMPLATES)
        what = f"SkyRL has no chat template {path!r} (known: {', '.join(known)})"
        fix = did_you_mean(path, known, listed=True) or "use generator.chat_template.source=file with a Jinja file"
        keys.problem(what, key=key, fix=fix)
    variables = keys.section("generator.chat_template_kwargs")
    for name, value in variables.items():
        if isinstance(value, dict | list):
            key = f"generator.chat_template_kwargs.{name}"
            keys.problem(
                f"{key} must be one value, not several", key=key, fix="write a text, a number or true or false"
            )
    plain = {name: value for name, value in variables.items() if not isinstance(value, dict | list)}
    return fields | ({"data.chat_template_options": plain} if plain else {})


def _rope(keys: Reader) -> dict[str, Any]:
    """Rotary positions: the trainer's, and the sampler's, which here are the same."""
    fields = {}
    for name in ("rope_scaling", "rope_theta"):
        trained, sampled = get(keys, f"trainer.{name}"), get(keys, f"generator.{name}")
        sampled = None if sampled == f"${{trainer.{name}}}" else sampled
        if keys.written(f"generator.{name}") and trained is not None and sampled != trained:
            key = f"generator.{name}"
            what = f"sampler and trainer must have the same {name}, and generator's is another one"
            keys.problem(what, key=key, fix=f"use {key}='${{trainer.{name}}}', or remove it")
        value = trained if trained is not None else sampled
        if value is not None:
            fields[f"model.config_overrides.{name}"] = value
    return fields


def _engine_init(keys: Reader) -> dict[str, Any]:
    """Options in the engine's own words; the same key in both sections is refused by two_names."""
    sections = ("generator.engine_init_kwargs", "generator.inference_engine.engine_init_kwargs")
    return {f"{_OPTIONS}.{name}": value for section in sections for name, value in keys.section(section).items()}
