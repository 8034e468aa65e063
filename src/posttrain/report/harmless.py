"""Escaping of model-written text for a page."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from typing import Any


def embed(data: object) -> str:
    """Serialize JSON for use inside a <script> element, without characters that HTML interprets. Non-ASCII characters, U+2028
    and lone surrogates included, are written as \\u escapes."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which another writer may leave in a file, by texts: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def source_hash(text: str) -> str:
    """Return a CSP source expression that allows exactly this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
