"""Sets of tokens as texts: bit by bit, compressed, in base64. A grammar leaves the same few sets at many places of a response."""

from __future__ import annotations

import base64
import functools
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def to_text(packed: bytes) -> str:
    """Return a set as a text. Args: packed, a bit per token id, the lowest bit of a byte first."""
    return base64.b64encode(zlib.compress(packed)).decode()


@functools.lru_cache(maxsize=4096)
def from_text(text: str) -> NDArray[np.bool_]:
    """Return a set as [vocabulary or up to 7 more] bool."""
    import numpy as np

    packed = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little").astype(np.bool_)
