"""JSON over HTTP, one try per call: an answer, or a typed failure. The sole importer of httpx2.

Retries are the caller's: rewards that query a server, samplers that are servers.
"""

from __future__ import annotations

import os
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import httpx2

from posttrain.libraries import json_text

TIMEOUT = "timeout"  # no answer before the deadline
STATUS = "status"  # an error status, or a redirect
CONNECTION = "connection"  # no connection, or a broken one
ANSWER = "answer"  # an answer that is too long or is not JSON

CONNECT_S = 10.0  # time limit of a connection attempt
FIRST_WAIT_S = 0.5  # before the second try; doubled before each further one
LONGEST_WAIT_S = 30.0


class HttpFailure(Exception):
    """A try failed. ``passing``: another try may succeed; ``after_s``: the wait that the server requests."""

    def __init__(self, kind: str, detail: str, *, passing: bool = False, after_s: float = 0.0, status: int = 0):
        super().__init__(detail)
        self.kind = kind
        self.passing = passing
        self.after_s = after_s
        self.status = status


def open_client(
    headers: Mapping[str, str], *, connections: int, connect_s: float = CONNECT_S, proxy_from_env: bool = False
) -> httpx2.AsyncClient:
    """Open a client without a limit on the whole request, which the caller limits. It checks certificates and does not follow
    redirects."""
    return httpx2.AsyncClient(
        headers={"Accept": "application/json", "Accept-Encoding": "identity", **headers},
        timeout=httpx2.Timeout(None, connect=connect_s),
        limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
        follow_redirects=False,
        trust_env=proxy_from_env,
        verify=_certificates(proxy_from_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
    )


@cache
def _certificates(from_env: bool, file: str | None, folder: str | None) -> ssl.SSLContext:
    """The context that checks certificates, for all clients with these variables: to read what a machine trusts takes 40 ms."""
    return httpx2.create_ssl_context(trust_env=from_env)


def is_url(text: str) -> bool:
    """Return True when requests can be sent to this address."""
    try:
        httpx2.URL(text)
    except (ValueError, httpx2.InvalidURL):
        return False
    return True


def short(text: str) -> str:
    """Shorten a text to one line of at most 200 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:200]}…"


async def ask(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    body: bytes | None = None,
    *,
    name: str,
    largest_bytes: int,
    quoted: Callable[[str], str] = short,
    empty: bool = False,
) -> Any:
    """Send a request and return the JSON of the answer; None for an empty answer where ``empty`` allows it (health checks).

    Args: ``body`` is JSON; ``name`` is the server's name in messages; ``quoted`` sanitises foreign text for messages.
    Raises: HttpFailure.
    """
    headers = {"Content-Type": "application/json"} if body is not None else {}
    try:
        async with client.stream(method, url, content=body, headers=headers) as response:
            data = bytearray()
            async for chunk in response.aiter_raw():  # not decompressed: a small answer could expand to a huge one
                data += chunk
                if len(data) > largest_bytes:
                    raise HttpFailure(ANSWER, f"the answer of {name} is longer than {largest_bytes >> 20} MiB")
    except httpx2.HTTPError as error:
        what = f"no answer from {name}: {type(error).__name__}: {quoted(str(error))}"
        raise HttpFailure(CONNECTION, what, passing=True) from error
    status = response.status_code
    if not 200 <= status < 300:
        raise HttpFailure(
            STATUS,
            _status_text(name, status, bytes(data), quoted),
            passing=status == 429 or status >= 500,
            after_s=_retry_after_s(response.headers.get("Retry-After", "")),
            status=status,
        )
    if empty and not data.strip():
        return None
    try:
        return json_text.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise HttpFailure(ANSWER, f"the answer of {name} is not JSON: {quoted(str(error))}") from None


def wait_s(body: bytes, attempt: int) -> float:
    """Return the wait after try ``attempt`` (from 0). It grows, depends on the body, so that requests that fail together are not
    retried together, and is the same in every run."""
    longest = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)
    return longest * random.Random(body + bytes([min(attempt, 255)])).uniform(0.5, 1.0)


def _status_text(name: str, status: int, data: bytes, quoted: Callable[[str], str]) -> str:
    text = f"{name} answered with status {status}"
    if 300 <= status < 400:
        return f"{text}, a redirect; redirects are not followed"
    if status in (401, 403) or not data:  # such answers often repeat a part of the key
        return text
    return f"{text}: {quoted(data[:2000].decode(errors='replace'))}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _retry_after_s(value: str) -> float:
    """Parse a Retry-After header, in seconds or as a date, to seconds from now; 0 when it is invalid."""
    if re.fullmatch(r"[0-9]{1,9}", value):
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0
