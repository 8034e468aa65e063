"""Serve Tinker's API from a ServeConfig."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from posttrain.backends.endpoint.server import serve
from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.runtime.inprocess import prepare_sampling_device
from posttrain.backends.tinker.adapters import AdaptedModel
from posttrain.backends.tinker.app import AppPlan, TinkerApp
from posttrain.backends.tinker.sampling import ClientSampling
from posttrain.backends.tinker.service import Service, ServicePlan
from posttrain.backends.tinker.store import Store
from posttrain.backends.tinker.training import Scorers
from posttrain.build.serve import address_of, host_names, open_listener, read_token, readable_by_others
from posttrain.config.serve import ServeConfig
from posttrain.errors import ConfigError, Problem
from posttrain.models.loading import DTYPES, import_modules, load_causal_lm, load_tokenizer

KEY_PREFIX = "tml-"  # without which the client sends no key
_BYTES_IN_TRAINING = 16  # per weight of an adapter: itself, its gradient and two averages, in float32
_SHOWN_RANK = 32  # the client's default


def serve_run(
    config: ServeConfig,
    *,
    on_ready: Callable[[str, str, list[str]], None],
    stopping: threading.Event | None = None,
) -> None:
    """Serve until a signal asks to stop, or ``stopping`` is set, as a program does that serves in a thread.

    Args: on_ready is called with the address, the key when it was drawn here ("" otherwise), and notes for the user.
    Raises: RequestError for what can be seen before the first request; whatever ends the worker.
    """
    token = read_token(config.endpoint)
    if token and not token.startswith(KEY_PREFIX):
        file = config.endpoint.token_file
        what = f"Tinker's clients only send keys that begin with {KEY_PREFIX}, and the one in {file} does not"
        raise ConfigError(Problem(what, fix=f"write {KEY_PREFIX} before it", field="endpoint.token_file"))
    key = token or KEY_PREFIX + secrets.token_urlsafe(24)
    import_modules(config.model.external_modules)
    with closing(open_listener(config.endpoint)) as listener:
        service = start_service(config)
        app = TinkerApp(AppPlan(token=key, host_names=host_names(config.endpoint)), service)
        notes = [*_notes(config, service), *readable_by_others(config.endpoint)]
        on_ready(address_of(listener), "" if token else key, notes)
        serve(app.app(), service.worker, listener, stopping)


def start_service(config: ServeConfig) -> Service:
    """Load the model and the tokenizer, and open the folder. Raises: RequestError."""
    folder = Path(config.tinker.folder).expanduser().resolve()
    try:
        store = Store(folder)
    except OSError as error:
        what = f"{folder} cannot be made: {error.strerror or error}"
        raise ConfigError(Problem(what, fix="name another folder", field="tinker.folder")) from None
    tokenizer = load_tokenizer(config.model)
    device = prepare_sampling_device(config.placement, config.model)
    model = load_causal_lm(
        config.model.path,
        dtype=DTYPES[config.model.compute_dtype],
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        config_overrides=config.model.config_overrides,
    ).requires_grad_(False)
    adapted = AdaptedModel(model, alpha=config.tinker.lora_alpha)
    scorers = Scorers(
        adapted,
        max_tokens=config.tinker.max_tokens_per_micro_batch,
        gradient_checkpointing=config.model.gradient_checkpointing,
    )
    rollout = config.rollout

    def make_engine() -> NativeEngine:
        return NativeEngine(
            model,
            tokenizer,
            max_concurrent_sequences=rollout.max_concurrent_sequences,
            max_prefill_tokens=rollout.max_prefill_tokens,
            weights=rollout.weights,
        )

    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 32768
    sampling = ClientSampling(scorers, make_engine, context=context, most_tokens=rollout.max_response_tokens)
    path = Path(config.model.path).expanduser()
    plan = ServicePlan(
        model=config.endpoint.name or path.name,
        aliases=frozenset({config.model.path, path.name, str(path.resolve())}),
        max_adapters=config.tinker.max_adapters,
        max_rank=config.tinker.max_rank,
        silence_s=config.tinker.session_timeout_s,
    )
    return Service(plan, adapted, scorers, sampling, tokenizer, store)


def _notes(config: ServeConfig, service: Service) -> list[str]:
    """Describe the server: its model, the memory of an adapter, and how clients are pointed at it."""
    weights = service.model.weights_of_rank(_SHOWN_RANK)
    trained, kept = (_mib(size * weights) for size in (_BYTES_IN_TRAINING, torch.float32.itemsize))
    return [
        f"serving {service.plan.model} from {service.model.model.device}, context {service.context} tokens; base_model="
        f"{service.plan.model!r}",
        f"an adapter of rank {_SHOWN_RANK} on all layers takes {trained} MiB in training and {kept} MiB per snapshot to sample "
        f"from; at most {config.tinker.max_adapters} are in training",
        f"states are saved in {service.store.folder}",
        "point clients here with these two variables, or ServiceClient(base_url=..., api_key=...)",
    ]


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f}"
