"""Serve an endpoint from a ServeConfig."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from posttrain.backends.endpoint.app import Endpoint, EndpointPlan
from posttrain.backends.endpoint.driver import Driver
from posttrain.backends.endpoint.page import with_page
from posttrain.backends.endpoint.record import Record
from posttrain.backends.endpoint.server import listen, serve
from posttrain.backends.endpoint.turns import InTurn, Together, Turns
from posttrain.backends.runtime.inprocess import start_sampler
from posttrain.build.plans import sampling_params
from posttrain.config.serve import EndpointConfig, ServeConfig
from posttrain.data.openai_api.own_sampling import DISTRIBUTION, Honours
from posttrain.data.tool_forms import chosen_form
from posttrain.errors import ConfigError, Problem
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.registry import ROLLOUT_ENGINES


def serve_run(
    config: ServeConfig,
    *,
    on_ready: Callable[[str, str, list[str]], None],
    stopping: threading.Event | None = None,
) -> None:
    """Serve until a signal asks to stop, or ``stopping`` is set, as a program does that serves in a thread.

    Args: on_ready is called with the address, the token when it was drawn here ("" otherwise), and notes for the user.
    Raises: RequestError for what can be seen before the first request; whatever ends the sampler.
    """
    token = read_token(config.endpoint)
    import_modules(config.model.external_modules)
    tokenizers = [load_tokenizer(each.model) for each in models_of(config)]
    with ExitStack() as stack:
        listener = stack.enter_context(closing(open_listener(config.endpoint)))
        record = _record(config.endpoint)
        if record is not None:
            stack.enter_context(closing(record))
        key, turns, device = token or secrets.token_urlsafe(24), Turns(), torch.device("cpu")
        drivers: list[Driver] = []
        endpoints: list[Endpoint] = []
        for each, name, tokenizer in zip(models_of(config), names_of(config), tokenizers, strict=True):
            engine, device = start_sampler(each, tokenizer)
            plan = _plan(each, name, key, tokenizer)
            drivers.append(Driver(InTurn(engine, turns) if config.endpoint.beside else engine, plan.sampling))
            recorded = record if not endpoints else None
            endpoints.append(Endpoint(plan, drivers[-1], tokenizer, dict(config.data.chat_template_options), recorded))
        address = address_of(listener)
        notes = [
            f"serving {' and '.join(names_of(config))} from {device}",
            *readable_by_others(config.endpoint),
            f"chat page: {address}/ (asks for the key)",
        ]
        on_ready(f"{address}/v1", "" if token else key, notes)
        serve(with_page(*endpoints), Together(drivers), listener, stopping)


def models_of(config: ServeConfig) -> list[ServeConfig]:
    """The configuration of each model that is served."""
    if config.endpoint.beside is None:
        return [config]
    beside = config.model.model_copy(update={"path": config.endpoint.beside})
    return [config, config.model_copy(update={"model": beside})]


def names_of(config: ServeConfig) -> list[str]:
    """The names of the models that are served, as clients see them; no two are equal."""
    first = config.endpoint.name or _name_of(config.model.path)
    if config.endpoint.beside is None:
        return [first]
    second = _name_of(config.endpoint.beside)
    return [first, f"{second} (beside)" if second == first else second]


def _name_of(path: str) -> str:
    """The name of a model's folder; in the hub's cache, models--ORG--NAME/snapshots/COMMIT, the model's."""
    folder = Path(path)
    return folder.parent.parent.name.split("--")[-1] if folder.parent.name == "snapshots" else folder.name


def _plan(config: ServeConfig, name: str, key: str, tokenizer: PreTrainedTokenizerBase) -> EndpointPlan:
    facts = ROLLOUT_ENGINES.facts(config.rollout.engine)
    return EndpointPlan(
        model=name,
        token=key,
        sampling=sampling_params(config.rollout, config.rollout.max_response_tokens, config.run.seed),
        max_prompt_tokens=config.data.max_prompt_tokens,
        honours=Honours(
            distributions=DISTRIBUTION if facts.samplings_of_requests else frozenset(),
            stops=facts.samplings_of_requests,
            seeds=facts.seeds_of_requests,
            tops=facts.reports_top_logprobs,
            echoes=facts.prompt_logprobs_of_requests,
            grammars=facts.grammars_of_requests,
            ignored=frozenset({*DISTRIBUTION, "stop"}) if config.endpoint.any_sampling else frozenset(),
        ),
        streams=facts.resumes_responses,
        tool_call_form=chosen_form(config.data.tool_call_form, getattr(tokenizer, "chat_template", None)),
        session_header=config.endpoint.session_header,
        max_sessions=config.endpoint.max_sessions,
        host_names=host_names(config.endpoint),
    )


def read_token(config: EndpointConfig) -> str:
    """The token in the file; "" where there is no file. Raises: ConfigError."""
    if config.token_file is None:
        return ""
    try:
        token = Path(config.token_file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(f"the token cannot be read: {error}", field="endpoint.token_file")) from None
    if not token:
        fix = "write a token into it, such as the output of: openssl rand -hex 24"
        raise ConfigError(Problem(f"{config.token_file} is empty", fix=fix, field="endpoint.token_file"))
    return token


def address_of(listener: socket.socket) -> str:
    """Return the URL of a server that listens there."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def readable_by_others(config: EndpointConfig) -> list[str]:
    """A note when others on this machine can read the token's file."""
    if config.token_file is None or not Path(config.token_file).expanduser().stat().st_mode & 0o077:
        return []
    return [f"endpoint.token_file can be read by other users of this machine: chmod 600 {config.token_file}"]


def host_names(config: EndpointConfig) -> frozenset[str]:
    """The names by which clients may call this machine: on loopback its own, elsewhere also those of the network."""
    names = {"localhost", config.host, *config.host_names}
    if not config.host.startswith("127.") and config.host not in ("localhost", "::1"):
        names |= {socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower().rstrip(".") for name in names)


def open_listener(config: EndpointConfig) -> socket.socket:
    try:
        return listen(config.host, config.port)
    except OSError as error:
        what = f"cannot listen at {config.host}:{config.port}: {error.strerror or error}"
        raise ConfigError(
            Problem(what, fix="use another endpoint.port, or 0 for a free one", field="endpoint.port")
        ) from None


def _record(config: EndpointConfig) -> Record | None:
    if config.record is None:
        return None
    try:
        return Record(Path(config.record).expanduser())
    except OSError as error:
        what = f"the record cannot be written: {error}"
        raise ConfigError(Problem(what, fix="name another file", field="endpoint.record")) from None
