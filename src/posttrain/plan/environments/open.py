"""The environment open: its address and its token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.registry import ENV_CHECKS


@ENV_CHECKS.register("open")
def outside(settings: Mapping[str, Any], field: str) -> Iterator[Problem]:
    port = settings.get("port", 8001)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        yield Problem(f"port is {port!r}", fix="use 0 to 65535; 0 takes a free one", field=f"{field}.port")
    for name in ("conversation_timeout_s", "group_timeout_s", "wait_s"):
        value = settings.get(name, 1.0)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e7:
            yield Problem(f"{name} is {value!r}", fix="use seconds above 0", field=f"{field}.{name}")
    ends, fails = settings.get("ends_after_s"), settings.get("conversation_timeout_s", 300.0)
    if ends is not None and not 0 < ends < fails:
        what = f"ends_after_s is {ends!r}, and a conversation fails after {fails:g} s without a request"
        yield Problem(what, fix=f"use seconds above 0 and below {fails:g}", field=f"{field}.ends_after_s")
    token_file = settings.get("token_file")
    if token_file is None:
        return
    try:
        empty = not Path(str(token_file)).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        yield Problem(f"the token cannot be read: {error}", field=f"{field}.token_file")
        return
    if empty:
        fix = "write a token into it, such as the output of: openssl rand -hex 24"
        yield Problem(f"{token_file} is empty", fix=fix, field=f"{field}.token_file")
