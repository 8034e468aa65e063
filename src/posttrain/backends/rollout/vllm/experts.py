"""Experts of every token, as vLLM reports them (``enable_return_routed_experts``)."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.backends.serving.protocol import UnusableAnswer

OPTION = "enable_return_routed_experts"
RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}  # in its environment: vLLM 0.32 reports them there alone
_FIX = f"start servers of your own with --{OPTION.replace('_', '-')} and VLLM_USE_V2_MODEL_RUNNER=1 (vLLM 0.32)"


def decoded(text: Any) -> NDArray[Any] | None:
    """Decode the experts in an answer, the file of an array as base64; None where there are none. Raises: UnusableAnswer."""
    if text is None:
        return None
    try:
        found: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text, validate=True)))
    except (ValueError, TypeError, EOFError, binascii.Error) as error:
        raise UnusableAnswer(f"the experts in the answer of vLLM cannot be read: {error}") from error
    return found


def of_routed_layers(found: Any, places: int, layers: Sequence[bool]) -> NDArray[np.int16]:
    """Return the experts of the layers that have some.

    Args: found [places, layers of the model, chosen], of prompt and response but its last token, which no pass has read; layers,
        which of them have experts.
    Returns: [places, layers with experts, chosen] int16. Raises: UnusableAnswer for none, or of another shape.
    """
    if found is None:
        raise UnusableAnswer(f"the answer of vLLM holds no experts of its tokens (rollout.routing_replay); {_FIX}")
    shape = np.shape(found)
    if len(shape) != 3 or shape[:2] != (places, len(layers)):
        what = f"the answer of vLLM holds experts of shape {shape}; [{places}, {len(layers)}, chosen] is expected"
        raise UnusableAnswer(f"{what}; try rollout.engine_options.enable_prefix_caching=false")
    return np.asarray(found)[:, list(layers)].astype(np.int16)
