"""Bodies of requests over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from posttrain.data.chat_api import Refused, check_framing, error_body


def framed(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Wrap an ASGI app so that requests whose bodies have no certain end get a 400, and their connections are closed."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers = Headers(scope=scope)
        try:
            check_framing(headers.getlist("content-length"), headers.getlist("transfer-encoding"))
        except Refused as refused:
            body = error_body(str(refused), refused.status)
            await JSONResponse(body, refused.status, {"Connection": "close"})(scope, receive, send)
            return
        await app(scope, receive, send)

    return answer


async def read_body(http: Request, *, largest: int, within_s: float) -> bytes:
    """Read a body. Raises: Refused when it has more than ``largest`` bytes, is not there in time, or the client has left."""
    too_long = Refused(f"the body has more than {largest} bytes", 413)
    given = http.headers.get("content-length", "")
    if given.isdigit() and int(given) > largest:
        raise too_long
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(within_s):
            async for piece in http.stream():
                size += len(piece)
                if size > largest:
                    raise too_long
                pieces.append(piece)
    except TimeoutError:
        raise Refused(f"the body did not come within {within_s:g} s", 408) from None
    except ClientDisconnect:
        raise Refused("the client has left", 499) from None
    return b"".join(pieces)
