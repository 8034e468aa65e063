"""HTTP requests to a scoring server: a JSON answer in time, or a typed failure.

Secrets stay out of configurations and messages: headers come from environment variables, and their values are removed
from quoted text.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import NotScored
from posttrain.libraries import json_http

if TYPE_CHECKING:
    import httpx2

# Values of Invalid.reason.
TIMEOUT = "http_timeout"  # no answer within timeout_s, retries and waits included
STATUS = "http_status"  # an error status, or a redirect
CONNECTION = "http_connection"  # no connection, or a broken one
ANSWER = "http_answer"  # an answer that is too long, is not JSON, or lacks the number

LARGEST_ANSWER_BYTES = 1 << 20

_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SECRET_NAME = re.compile(r"key|token|secret|passw|signature|^sig$|auth", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringServer:
    """A scoring server, with its headers, deadline, retries and concurrency."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float  # from the first try to the last, waits included
    retries: int
    concurrency: int
    proxy_from_env: bool = False  # HTTP_PROXY, HTTPS_PROXY, NO_PROXY

    def __str__(self) -> str:
        """The address without its query, which may be long."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"

    def quoted(self, text: str) -> str:
        """Quote the text of a server or a library in one line of at most 200 characters, without the values of the headers."""
        for value in self.headers.values():
            for secret in (value, value.rpartition(" ")[2]):  # "Bearer abc", and abc
                text = text.replace(secret, "…")
        return json_http.short(text)


@dataclass(slots=True)
class Counts:
    """Counts of requests, retries and cache hits, and of the tokens that answers report."""

    requests: int = 0  # tries, successful or not
    retries: int = 0  # tries after the first
    cache_hits: int = 0  # responses scored without a request
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add_usage(self, answer: Any) -> None:
        """Add the token counts of an answer that reports them in the form of OpenAI's API."""
        usage = answer.get("usage") if isinstance(answer, Mapping) else None
        if not isinstance(usage, Mapping):
            return
        for name in ("prompt_tokens", "completion_tokens"):
            tokens = usage.get(name)
            if type(tokens) is int and tokens > 0:
                setattr(self, name, getattr(self, name) + tokens)


# Exception of a failed try -> its reason.
_REASONS = {
    json_http.TIMEOUT: TIMEOUT,
    json_http.STATUS: STATUS,
    json_http.CONNECTION: CONNECTION,
    json_http.ANSWER: ANSWER,
}


def make_server(
    url: str,
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    retries: int,
    concurrency: int,
    proxy_from_env: bool,
    url_option: str,
) -> ScoringServer:
    """Build a ScoringServer from options. Args: ``url_option`` is the name of the option that holds the url, for messages.

    Raises: ConfigError with all problems.
    """
    problems = list(_wrong_url(url, url_option))
    for name, value, least in (("retries", retries, 0), ("concurrency", concurrency, 1)):
        if value < least:
            problems.append(Problem(f"{name} is {value}", fix=f"{least} or more", field=f"options.{name}"))
    if not 0 < timeout_s <= 86_400:
        problems.append(
            Problem(f"timeout_s is {timeout_s:g}", fix="more than 0 s, at most a day", field="options.timeout_s")
        )
    if problems:
        raise ConfigError(problems)
    return ScoringServer(
        url=url,
        headers=headers,
        timeout_s=timeout_s,
        retries=retries,
        concurrency=concurrency,
        proxy_from_env=proxy_from_env,
    )


def _wrong_url(url: str, option: str) -> list[Problem]:
    """Check the url, without quoting one that contains a secret."""
    place = f"options.{option}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and json_http.is_url(url)
    except ValueError:
        usable = False
    if not usable:
        return [Problem(f"{option} is not the address of a server", fix="such as http://host:8000/score", field=place)]
    if "@" in parts.netloc or any(_SECRET_NAME.search(name) for name, _ in parse_qsl(parts.query)):
        fix = "keep it in an environment variable and name that (docs/rewards.md)"
        return [Problem(f"{option} holds a password or key, which would be saved with the run", fix=fix, field=place)]
    return []


def secret_of(variable: str, option: str) -> str:
    """Read an environment variable, for use in a header. No message quotes what was given: it may be the secret itself.

    Raises: ConfigError.
    """
    if not _ENVIRONMENT_NAME.fullmatch(variable):
        what, fix = f"{option} is not the name of an environment variable", "put the value there, and its name here"
        raise ConfigError(Problem(what, fix=fix, field=f"options.{option}"))
    value = os.environ.get(variable, "").strip()
    if not value:
        fix = "set it in the shell that starts the run"
        raise ConfigError(
            Problem(f"the environment variable that {option} names is not set", fix=fix, field=f"options.{option}")
        )
    if not (value.isascii() and value.isprintable()):
        what = f"the environment variable that {option} names holds characters that no header can"
        raise ConfigError(Problem(what, fix="printable ASCII in one line", field=f"options.{option}"))
    return value


def headers_of(headers_from_env: Mapping[str, str] | None) -> dict[str, str]:
    """Build the headers from header names and their environment variables. Raises: ConfigError."""
    headers = {}
    for name, variable in (headers_from_env or {}).items():
        if not _HEADER_NAME.fullmatch(name):
            raise ConfigError(Problem("headers_from_env has a name that is no header's", field="options"))
        headers[name] = secret_of(variable, f"headers_from_env.{name}")
    return headers


def open_client(server: ScoringServer) -> httpx2.AsyncClient:
    """Open a client that checks certificates and does not follow redirects; ``post`` applies the deadline."""
    return json_http.open_client(
        server.headers,
        connections=server.concurrency,
        connect_s=min(json_http.CONNECT_S, server.timeout_s),
        proxy_from_env=server.proxy_from_env,
    )


async def post(client: httpx2.AsyncClient, server: ScoringServer, body: bytes, counts: Counts) -> Any:
    """POST ``body``, which is JSON, and return the JSON of the answer.

    Retried, with growing waits, without a connection, on status 429 and from 500 on, unless the wait would end after the
    deadline. The waits depend on the body, so that requests that fail together are not retried together, and are the same in
    every run.
    Raises: NotScored.
    """
    end = asyncio.get_running_loop().time() + server.timeout_s
    try:
        async with asyncio.timeout_at(end):
            for attempt in range(server.retries + 1):
                counts.requests += 1
                counts.retries += attempt > 0
                try:
                    return await json_http.ask(
                        client,
                        "POST",
                        server.url,
                        body,
                        name=str(server),
                        largest_bytes=LARGEST_ANSWER_BYTES,
                        quoted=server.quoted,
                    )
                except json_http.HttpFailure as failure:
                    wait_s = max(failure.after_s, json_http.wait_s(body, attempt))
                    too_late = asyncio.get_running_loop().time() + wait_s >= end
                    if not failure.passing or attempt == server.retries or too_late:
                        raise NotScored(_REASONS[failure.kind], str(failure)) from None
                await asyncio.sleep(wait_s)
    except TimeoutError:
        raise NotScored(TIMEOUT, f"{server} did not answer within {server.timeout_s:g} s") from None
    raise AssertionError("the last try ends the loop")
