"""The folder that an engine writes and reads: its files, and the check that they belong to this model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.errors import ModelError, Problem
from posttrain.models import lora
from posttrain.models.chunks import OPTIMIZER_CHUNKS, WEIGHT_CHUNKS, Chunk, ChunkedTensors, write_chunks
from posttrain.models.hugging_face_weights import stored_boxes
from posttrain.models.saving import save_config
from posttrain.run.durable import note_hashes

OPTIMIZER = "optimizer.safetensors"
COUNTERS = "engine.json"
WEIGHT_FILES = "model*.safetensors"  # transformers': one, or model-00001-of-0000N


def chunk_writer(
    rank: int,
    weights: Sequence[Chunk],
    averages: Sequence[Chunk],
    shell: PreTrainedModel,
    beside: Callable[[Path], None],
) -> Callable[[Path], None]:
    """Return the function that writes the chunks of process ``rank`` into a folder; the first also writes the configuration."""

    def write(folder: Path) -> None:
        note_hashes(write_chunks(folder / WEIGHT_CHUNKS, rank, weights))
        note_hashes(write_chunks(folder / OPTIMIZER_CHUNKS, rank, averages))
        if rank == 0:
            save_config(shell, folder)
            beside(folder)

    return write


def saved_weights(
    folder: Path,
    model: PreTrainedModel,
    model_class: Any,
    *,
    adapted: bool,
    path_field: str,
    shape: Callable[[Tensor], torch.Size] = lambda tensor: tensor.shape,
) -> Mapping[str, Tensor]:
    """Return the whole weights, or those of the adapter, in a folder written by an engine, by the model's own names. Of files
    that hold the model's tensors, in parts or whole, each is read when it is used.

    Args: path_field, the setting that names the starting weights; shape of the whole tensor of a parameter.
    Raises: ModelError when the folder holds another model, or other kinds of weights.
    """
    check_kind(folder, adapted=adapted, path_field=path_field)
    if adapted:
        return lora.adapter_tensors(folder, field=path_field)
    in_chunks = (folder / WEIGHT_CHUNKS).is_dir()
    saved = ChunkedTensors(folder / WEIGHT_CHUNKS) if in_chunks else _in_files(folder, model, shape)
    if saved is not None:
        names = {name for name, _ in model.named_parameters()}
        if names <= saved.keys() and saved.keys() - names <= model.state_dict().keys():
            return saved
        if in_chunks:
            raise of_another_model(folder, model, path_field)
    # transformers computes what the model has from what its files hold, or says that they are of another one.
    loaded: Any = model_class.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
    )
    whole, report = loaded
    if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise of_another_model(folder, model, path_field)
    return dict(whole.named_parameters())


def _in_files(folder: Path, model: PreTrainedModel, shape: Callable[[Tensor], torch.Size]) -> ChunkedTensors | None:
    """Return the weights in transformers' files; None without any, and where they hold no parts of the model's."""
    files = sorted(folder.glob(WEIGHT_FILES))
    boxes = stored_boxes(model, shape) if files else None
    return None if boxes is None else ChunkedTensors(folder, whole=files, boxes=boxes)


def saved_averages(folder: Path) -> Mapping[str, Tensor]:
    """Return the optimizer's averages in a folder written by an engine, by "kind:name of the weight"."""
    if (folder / OPTIMIZER_CHUNKS).is_dir():
        return ChunkedTensors(folder / OPTIMIZER_CHUNKS)
    if (folder / WEIGHT_CHUNKS).is_dir():
        return {}  # saved before the first update
    return ChunkedTensors(folder, whole=[folder / OPTIMIZER])


def of_another_model(folder: Path, model: PreTrainedModel, path_field: str) -> ModelError:
    what = f"the checkpoint {folder} is of another model than {model.name_or_path}"
    fix = f"set {path_field} back, or name another run.folder"
    return ModelError(Problem(what, fix=fix, field=path_field))


def check_kind(folder: Path, *, adapted: bool, path_field: str) -> None:
    """Check that a folder written by an engine holds what this run trains, an adapter or a whole model.

    Args: path_field, the setting that names the starting weights.
    Raises: ModelError when it does not.
    """
    holds_adapter = (folder / lora.WEIGHTS).is_file()
    if holds_adapter != adapted:
        kinds = "the weights of a whole model", "an adapter"
        held, wanted = kinds[holds_adapter], kinds[adapted]
        field = f"{path_field.rpartition('.')[0].replace('model', 'policy')}.lora"
        what = f"the checkpoint {folder} holds {held}, and this run trains {wanted}"
        raise ModelError(Problem(what, fix=f"set {field} back, or name another run.folder", field=field))
