"""Bodies of requests over HTTP."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from posttrain.data.chat_api import Refused


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
