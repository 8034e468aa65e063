"""Writing a model's folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_accelerate_available

_lock = threading.Lock()


def save_model(model: PreTrainedModel, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """``model.save_pretrained``: configuration, generation settings and weights, those of ``state_dict`` where it is given."""
    with _not_asking_for_deepspeed():
        model.save_pretrained(folder, state_dict=None if state_dict is None else dict(state_dict))


@contextmanager
def _not_asking_for_deepspeed() -> Iterator[None]:
    """transformers asks accelerate whether DeepSpeed has wrapped the model, and accelerate imports DeepSpeed for that wherever it
    is installed: seconds, and a line of its log. No model that is saved here is wrapped (accelerate 1.x)."""
    if not is_accelerate_available():
        yield
        return
    from accelerate.utils import other

    with _lock:
        asked = other.is_deepspeed_available
        other.is_deepspeed_available = lambda: False
        try:
            yield
        finally:
            other.is_deepspeed_available = asked
