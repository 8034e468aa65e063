"""The sampler of a run and the way weights get to it, from its configuration."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.reward_model.judge import LocalJudge, question_of
from posttrain.config import RunConfig
from posttrain.config.config_apart import overrides_of
from posttrain.config.judge import JudgeConfig, judge_field
from posttrain.config.lora import LoraConfig
from posttrain.config.model import ModelConfig
from posttrain.config.roles import sends_adapter, shares_weights
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import ModelError, Problem
from posttrain.interfaces.rollout_engine import NodeSpan, RolloutEngine, SamplerPlan
from posttrain.interfaces.weight_sync import WeightSync
from posttrain.models.hugging_face_weights import hugging_face_weights
from posttrain.models.loading import (
    DTYPES,
    expanded,
    load_causal_lm,
    load_model_config,
    load_tokenizer,
    overrides_for_servers,
)
from posttrain.models.lora import adapter_rank, write_own_adapter
from posttrain.plan.experts import expert_layers
from posttrain.records.trajectories import SamplingParams
from posttrain.registry import ROLLOUT_ENGINES, WEIGHT_SYNCS


def make_sampler(
    rollout: RolloutConfig,
    model: ModelConfig,
    load: Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    seed: int,
    max_prompt_tokens: int,
    lora: LoraConfig | None = None,
    span: NodeSpan | None = None,
    image_options: Mapping[str, Any] = MappingProxyType({}),
) -> RolloutEngine:
    """Args: ``load`` gives the module to sample from; it is not called for samplers with a copy of the weights. ``lora`` is the
        policy's; ``span`` is for servers over several machines.

    Raises: RequestError when something is missing that the engine needs; RunStopped when its server does not start.
    """
    engine: Any = ROLLOUT_ENGINES.get(rollout.engine)
    if shares_weights(rollout.engine):
        sharing: RolloutEngine = engine(
            load(),
            tokenizer,
            max_concurrent_sequences=rollout.max_concurrent_sequences,
            max_prefill_tokens=rollout.max_prefill_tokens,
            **({"records_experts": True} if rollout.routing_replay else {}),
            **({"weights": rollout.weights} if rollout.weights != "compute_dtype" else {}),
        )
        return sharing
    served: RolloutEngine = engine(
        sampler_plan(
            rollout,
            model,
            tokenizer,
            device=device,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            lora=lora,
            span=span,
            image_options=image_options,
        ),
        tokenizer,
    )
    return served


def sampler_plan(
    rollout: RolloutConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    seed: int,
    max_prompt_tokens: int,
    lora: LoraConfig | None = None,
    span: NodeSpan | None = None,
    image_options: Mapping[str, Any] = MappingProxyType({}),
) -> SamplerPlan:
    path = absolute(model.path)
    alone = sends_adapter(rollout, lora)
    notes = []
    if lora is not None:
        notes.append(
            f"{rollout.engine} is sent the adapter alone, over the base weights that it has loaded itself"
            if alone
            else f"the adapter is merged into its layers for {rollout.engine}, which is sent all weights"
        )
    if rollout.engine == "vllm" and device.type == "cpu" and not rollout.endpoints:
        notes.append(
            "vllm prefills whole prompts (enable_chunked_prefill is off): on a CPU, vLLM 0.32 dies of a seeded request whose "
            "prompt was prefilled in pieces"
        )
    return SamplerPlan(
        model_path=path,
        tokenizer_path=absolute(model.tokenizer_path or model.path),
        trust_remote_code=model.trust_remote_code,
        config_overrides=overrides_for_servers(path, overrides_of(model), model.trust_remote_code),
        dtype=model.compute_dtype,
        cuda=device.type == "cuda",
        seed=seed,
        end_tokens=_end_tokens(path, tokenizer, model.trust_remote_code),
        max_model_len=max_prompt_tokens + rollout.max_response_tokens,
        max_concurrent_sequences=rollout.max_concurrent_sequences,
        max_prefill_tokens=rollout.max_prefill_tokens,
        tensor_parallel=rollout.tensor_parallel,
        endpoints=tuple(rollout.endpoints),
        timeout_s=rollout.timeout_s,
        retries=rollout.retries,
        adapter_rank=adapter_rank(lora) if alone and lora is not None else 0,
        span=span,
        note="; ".join(notes),
        options=rollout.engine_options,
        image_options=image_options,
        expert_layers=_expert_layers(model) if rollout.routing_replay else (),
    )


def _expert_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Return which layers have experts, by the model's config.json. Raises: ModelError for a model without any."""
    field = "rollout.routing_replay"
    text = load_model_config(expanded(model.path), model.trust_remote_code).get_text_config().to_dict()
    experts = expert_layers(text | overrides_of(model))
    if experts is None:
        what = f"{field} is about the routers of a mixture of experts, and {model.path} has none"
        raise ModelError(Problem(what, fix=f"leave {field} out, or use a model with experts", field=field))
    return experts.layers


def ranks_per_copy(rollout: RolloutConfig) -> int:
    """Processes that share one copy of a server's weights."""
    options = rollout.engine_options
    pipeline = options.get("pipeline_parallel_size") or options.get("inference_engine_pipeline_parallel_size") or 1
    return rollout.tensor_parallel * int(pipeline)


def start_weight_sync(
    rollout: RolloutConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    lora: LoraConfig | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> WeightSync:
    """Start the weight sync of this sampler. ``lora`` is the adapter on ``model``; ``tell`` prints messages for people."""
    sync = _weight_sync(rollout, model, tokenizer, device=device, lora=lora)
    if rollout.weight_hash_every_steps is None:
        return sync
    hashed: WeightSync = WEIGHT_SYNCS.get("hashed")(
        sync, partial(hugging_face_weights, model), every_steps=rollout.weight_hash_every_steps, report=tell
    )
    return hashed


def _weight_sync(
    rollout: RolloutConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    lora: LoraConfig | None,
) -> WeightSync:
    if shares_weights(rollout.engine):
        shared: WeightSync = WEIGHT_SYNCS.get("in_memory")()
        return shared
    weights, bucket_bytes = partial(hugging_face_weights, model), rollout.weight_bucket_mib << 20
    if rollout.weight_sync == "collective":
        broadcast: WeightSync = WEIGHT_SYNCS.get("collective")(
            weights,
            backend=rollout.engine_options.get("weight_sync_backend", "nccl") if device.type == "cuda" else "gloo",
            address=_own_address(rollout.endpoints),
            workers=ranks_per_copy(rollout),
            bucket_bytes=bucket_bytes,
        )
        return broadcast

    def describe(folder: Path) -> None:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    folder = Path(rollout.weight_folder or tempfile.mkdtemp(prefix="posttrain-weights-"))
    if sends_adapter(rollout, lora):
        adapter: WeightSync = WEIGHT_SYNCS.get("adapter")(
            partial(write_own_adapter, model),
            folder=folder.expanduser().resolve(),
            temporary=rollout.weight_folder is None,
        )
        return adapter
    disk: WeightSync = WEIGHT_SYNCS.get("disk")(
        weights,
        folder=folder.expanduser().resolve(),
        shard_bytes=bucket_bytes,
        beside=describe,
        temporary=rollout.weight_folder is None,
    )
    return disk


def _end_tokens(path: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> frozenset[int]:
    """End tokens as in ``models.loading.end_token_ids``, read from the files alone."""
    found = [getattr(load_model_config(path, trust_remote_code).get_text_config(), "eos_token_id", None)]
    with suppress(OSError):  # a folder without one
        found.append(GenerationConfig.from_pretrained(path).eos_token_id)
    found.append(tokenizer.eos_token_id)
    return frozenset(id for ids in found if ids is not None for id in (ids if isinstance(ids, list) else [ids]))


def absolute(path: str) -> str:
    """A folder by its whole name, for a server that starts elsewhere; hub ids stay as they are."""
    folder = Path(expanded(path))
    return str(folder.resolve()) if folder.exists() else path


def _own_address(endpoints: list[str]) -> str:
    """This machine's address, as the server can reach it."""
    hosts = {urlsplit(url if "://" in url else f"http://{url}").hostname for url in endpoints}
    here = hosts <= {"127.0.0.1", "localhost", "::1"}
    return "127.0.0.1" if here else socket.gethostbyname(socket.gethostname())


def start_judges(config: RunConfig, device: torch.device) -> dict[str, LocalJudge]:
    """Build the run's judges, by the names of their verdicts."""
    return {name: start_judge(config, name, judge, device) for name, judge in config.reward.judges.items()}


def start_judge(config: RunConfig, name: str, judge: JudgeConfig, device: torch.device) -> LocalJudge:
    """Build a judge, with a sampler and a model of its own."""
    question = question_of(judge, judge_field(name))
    model = config.model.model_copy(
        update={
            "path": judge.path,
            "tokenizer_path": None,
            "trust_remote_code": judge.trust_remote_code,
            "chat_template": None,
            "chat_template_file": None,
            "config_overrides": {},
            "config_path": None,
        }
    )
    rollout = RolloutConfig(
        engine=judge.engine,
        engine_options=judge.engine_options,
        samples_per_prompt=1,
        max_response_tokens=judge.max_tokens,
        max_concurrent_sequences=judge.max_concurrent_sequences,
    )

    def load() -> PreTrainedModel:
        return load_causal_lm(
            judge.path, dtype=DTYPES[model.compute_dtype], device=device, trust_remote_code=judge.trust_remote_code
        ).requires_grad_(False)

    tokenizer = load_tokenizer(model)
    engine = make_sampler(
        rollout,
        model,
        load,
        tokenizer,
        device=device,
        seed=config.run.seed,
        max_prompt_tokens=judge.max_prompt_tokens,
    )
    sampling = SamplingParams(
        max_response_tokens=judge.max_tokens,
        temperature=judge.temperature,
        top_p=judge.top_p,
        top_k=judge.top_k,
        seed=config.run.seed,
    )
    return LocalJudge(engine, tokenizer, question, sampling, judge, name)
