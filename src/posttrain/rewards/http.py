"""Asking a server over HTTP: a JSON answer in time, or a typed failure.

Nothing that is secret is in a configuration or a message: headers come from environment variables, and their values are cut
out of whatever is quoted.
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

# The words of Invalid.reason.
TIMEOUT = "http_timeout"  # no answer within timeout_s, tries and waits included
STATUS = "http_status"  # the answer says that it failed, or is a redirect
CONNECTION = "http_connection"  # no connection, or one that broke
ANSWER = "http_answer"  # an answer that is too long, no JSON, or without the number

LARGEST_ANSWER_BYTES = 1 << 20

_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SECRET_NAME = re.compile(r"key|token|secret|passw|signature|^sig$|auth", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where a reward asks, and how patiently."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float  # from the first try to the last, waits included
    retries: int
    concurrency: int
    proxy_from_env: bool = False  # HTTP_PROXY, HTTPS_PROXY, NO_PROXY

    def __str__(self) -> str:
        """Without the query, which may be long."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"

    def quoted(self, text: str) -> str:
        """A server's or a library's words in one line of at most 200 characters, without the values of the headers."""
        for value in self.headers.values():
            for secret in (value, value.rpartition(" ")[2]):  # "Bearer abc", and abc
                text = text.replace(secret, "…")
        return json_http.short(text)


@dataclass(slots=True)
class Counts:
    """What has been asked, and what the answers say that it took."""

    requests: int = 0  # tries, whatever became of them
    retries: int = 0  # those among them that were not the first
    cache_hits: int = 0  # responses that needed no request
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add_usage(self, answer: Any) -> None:
        """The token counts of an answer that reports them as OpenAI's API does."""
        usage = answer.get("usage") if isinstance(answer, Mapping) else None
        if not isinstance(usage, Mapping):
            return
        for name in ("prompt_tokens", "completion_tokens"):
            tokens = usage.get(name)
            if type(tokens) is int and tokens > 0:
                setattr(self, name, getattr(self, name) + tokens)


# The failure of a try -> the word for it.
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
) -> Server:
    """Args: ``url_option`` is the option that the user calls the url by.

    Raises: ConfigError with everything that is wrong.
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
    return Server(
        url=url,
        headers=headers,
        timeout_s=timeout_s,
        retries=retries,
        concurrency=concurrency,
        proxy_from_env=proxy_from_env,
    )


def _wrong_url(url: str, option: str) -> list[Problem]:
    """A url with a secret in it is not quoted."""
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
    """The value of an environment variable, fit for a header. No message repeats what was given: it may be the secret itself.

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
    """Header names and the environment variables of their values, as headers. Raises: ConfigError."""
    headers = {}
    for name, variable in (headers_from_env or {}).items():
        if not _HEADER_NAME.fullmatch(name):
            raise ConfigError(Problem("headers_from_env has a name that is no header's", field="options"))
        headers[name] = secret_of(variable, f"headers_from_env.{name}")
    return headers


def open_client(server: Server) -> httpx2.AsyncClient:
    """Certificates are checked, redirects are not followed; the whole has its deadline in ``post``."""
    return json_http.open_client(
        server.headers,
        connections=server.concurrency,
        connect_s=min(json_http.CONNECT_S, server.timeout_s),
        proxy_from_env=server.proxy_from_env,
    )


async def post(client: httpx2.AsyncClient, server: Server, body: bytes, counts: Counts) -> Any:
    """The JSON of the answer to a POST of ``body``, which is JSON.

    Tried again, after growing waits, when there is no connection, on status 429 and from 500 on; not when the wait would end
    after the deadline. The waits differ from body to body, so that requests that fail together do not come back together, and
    are the same in every run.
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
