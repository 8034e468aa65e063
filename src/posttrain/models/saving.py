"""Writing of a model's folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils.import_utils import is_accelerate_available
from transformers.utils.logging import disable_progress_bar

_lock = threading.Lock()


def save_model(model: PreTrainedModel, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Run ``model.save_pretrained``: configuration, generation settings and weights, those of ``state_dict`` where given."""
    disable_progress_bar()  # one per weight file would overwrite our own display
    with _without_deepspeed_check():
        model.save_pretrained(folder, state_dict=None if state_dict is None else dict(state_dict))


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write configuration and generation settings only, always with dtype float32: loading would round the weights to any other
    dtype named there."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)  # type: ignore[arg-type]  # its annotation is of a dict
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


@contextmanager
def _without_deepspeed_check() -> Iterator[None]:
    """Skip a check of transformers: accelerate imports DeepSpeed, where it is installed, to see if it wraps the model, which
    takes seconds and writes a log line. No model saved here is wrapped (accelerate 1.x)."""
    if not is_accelerate_available():
        yield
        return
    from accelerate.utils import other

    with _lock:
        check = other.is_deepspeed_available
        other.is_deepspeed_available = lambda: False
        try:
            yield
        finally:
            other.is_deepspeed_available = check
