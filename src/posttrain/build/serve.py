"""Serve an endpoint from a ServeConfig."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from posttrain.backends.endpoint.app import Endpoint, EndpointPlan
from posttrain.backends.endpoint.driver import Driver
from posttrain.backends.endpoint.record import Record
from posttrain.backends.endpoint.server import listen, serve
from posttrain.backends.runtime.inprocess import start_sampler
from posttrain.build.plans import sampling_params
from posttrain.config.serve import EndpointConfig, ServeConfig
from posttrain.errors import ConfigError, Problem
from posttrain.models.loading import import_modules, load_tokenizer


def serve_run(config: ServeConfig, *, on_ready: Callable[[str, str, list[str]], None]) -> None:
    """Serve until a signal asks to stop.

    Args: on_ready is called with the address, the token when it was drawn here ("" otherwise), and notes for the user.
    Raises: RequestError for what can be seen before the first request; whatever ends the sampler.
    """
    token = _token(config.endpoint)
    import_modules(config.model.external_modules)
    tokenizer = load_tokenizer(config.model)
    with ExitStack() as stack:
        listener = stack.enter_context(closing(_listener(config.endpoint)))
        record = _record(config.endpoint)
        if record is not None:
            stack.enter_context(closing(record))
        engine, device = start_sampler(config, tokenizer)
        plan = EndpointPlan(
            model=config.endpoint.name or Path(config.model.path).name,
            token=token or secrets.token_urlsafe(24),
            sampling=sampling_params(config.rollout, config.rollout.max_response_tokens, config.run.seed),
            max_prompt_tokens=config.data.max_prompt_tokens,
            any_sampling=config.endpoint.any_sampling,
            session_header=config.endpoint.session_header,
            max_sessions=config.endpoint.max_sessions,
            host_names=_host_names(config.endpoint),
        )
        driver = Driver(engine, plan.sampling)
        endpoint = Endpoint(plan, driver, tokenizer, dict(config.data.chat_template_options), record)
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        notes = [f"serving {plan.model} from {device}", *_readable_by_others(config.endpoint)]
        on_ready(address, "" if token else plan.token, notes)
        serve(endpoint, driver, listener)


def _token(config: EndpointConfig) -> str:
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


def _readable_by_others(config: EndpointConfig) -> list[str]:
    """A note when others on this machine can read the token's file."""
    if config.token_file is None or not Path(config.token_file).expanduser().stat().st_mode & 0o077:
        return []
    return [f"endpoint.token_file can be read by other users of this machine: chmod 600 {config.token_file}"]


def _host_names(config: EndpointConfig) -> frozenset[str]:
    """The names by which clients may call this machine: on loopback its own, elsewhere also those of the network."""
    names = {"localhost", config.host, *config.host_names}
    if not config.host.startswith("127.") and config.host not in ("localhost", "::1"):
        names |= {socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower().rstrip(".") for name in names)


def _listener(config: EndpointConfig) -> socket.socket:
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
