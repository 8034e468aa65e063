"""The Host header of a request, against DNS rebinding: a page on the web whose own name resolves to this machine."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit


def names_this_machine(header: str, names: Collection[str]) -> bool:
    """Return True when a Host header holds one of ``names`` or an address in digits, which no page can have for its name."""
    try:
        host = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:  # [::1
        return False
    if host in names:
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
