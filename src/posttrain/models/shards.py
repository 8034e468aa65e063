"""Weights saved in shards by another trainer, one file per rank, merged into whole tensors.

    FOLDER/model_world_size_W_rank_R.pt      the sharded state dict of rank R (torch.save of DTensors)
    FOLDER/huggingface/  or  FOLDER          config.json and the tokenizer

verl writes this below global_step_N/actor and /critic, SkyRL below global_step_N/policy and /critic. The files are pickles,
which could run code: they are read with torch's weights_only, which builds tensors and rejects all else.
"""

from __future__ import annotations

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed.tensor as distributed  # registers DTensor for unpickling
from torch import Tensor

from posttrain.errors import ModelError, Problem

SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def has_shards(folder: Path) -> bool:
    """Return True when a folder holds at least one shard."""
    return folder.is_dir() and any(SHARD.fullmatch(path.name) for path in folder.iterdir())


def merge_shards(folder: Path) -> dict[str, Tensor]:
    """Merge the shards. Returns: the whole tensors, by name, in the saved precision.

    Raises: ModelError when a rank's file is missing, truncated, holds other objects than tensors, or does not fit the others.
    """
    ranks = [_tensors(path) for path in _files(folder)]
    names = set(ranks[0])
    if any(set(tensors) != names for tensors in ranks):
        raise _error(f"the shards in {folder} do not hold the same tensors", "copy them all from one checkpoint")
    adapters = sorted(name for name in names if "lora_" in name)
    if adapters:
        what = f"the shards in {folder} are of a model with LoRA adapters ({adapters[0]}), which cannot be merged"
        raise _error(what, "merge the adapter with the trainer that made it")
    merged = {}
    for name in ranks[0]:
        try:
            merged[_plain(name)] = _whole([tensors[name] for tensors in ranks])
        except (RuntimeError, IndexError) as error:
            raise _error(f"the shards of {name} in {folder} do not fit together: {error}", "copy them again") from error
    return merged


def _files(folder: Path) -> list[Path]:
    """Return one file per rank, in the order of the ranks."""
    found = [match for path in folder.iterdir() if (match := SHARD.fullmatch(path.name))]
    sizes = sorted({int(match[1]) for match in found})
    if len(sizes) != 1:
        what = (
            f"{folder} holds shards of world sizes {', '.join(map(str, sizes))}" if sizes else f"{folder} has no shards"
        )
        raise _error(what, "name a folder with the shards of one checkpoint")
    files = [folder / f"model_world_size_{sizes[0]}_rank_{rank}.pt" for rank in range(sizes[0])]
    if missing := [path.name for path in files if not path.is_file()]:
        raise _error(f"{folder} lacks {missing[0]} ({len(missing)} of {sizes[0]} ranks are missing)", "copy them all")
    return files


def _tensors(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        names = re.search(r"GLOBAL (\S+)", str(error))
        requested = f" ({names[1]})" if names else ""
        what = f"{path} holds more than tensors{requested}; nothing of it was run"
        raise _error(what, "get the file from whom you trust, as tensors only") from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _error(f"{path} cannot be read: {text}", "copy it again") from error
    tensors = isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values())
    if not tensors:
        raise _error(f"{path} is not a table of tensors", "name the model's shards")
    return dict(content)


def _whole(shards: list[Tensor]) -> Tensor:
    """Assemble one tensor from its parts on all ranks.

    A DTensor names its mesh of ranks, and for each mesh dimension the tensor dimension along which it is sharded, or that it is
    replicated. Shards may be uneven; the last ranks may hold nothing.
    """
    first = shards[0]
    if not isinstance(first, distributed.DTensor):
        return first  # replicated on every rank
    mesh = first.device_mesh.mesh

    def joined(ranks: Tensor, dimension: int) -> Tensor:
        if ranks.ndim == 0:
            local: Tensor = shards[int(ranks)]._local_tensor  # type: ignore[attr-defined]
            return local
        placement = first.placements[dimension]
        if placement.is_replicate():
            return joined(ranks[0], dimension + 1)
        if not isinstance(placement, distributed.Shard):
            raise RuntimeError(f"placement {placement} is not known")
        return torch.cat([joined(part, dimension + 1) for part in ranks], dim=placement.dim)

    whole = joined(mesh, 0)
    if whole.shape != first.shape:
        raise RuntimeError(f"together they have shape {tuple(whole.shape)}, not {tuple(first.shape)}")
    return whole.clone()


def _plain(name: str) -> str:
    """Return a parameter's own name, without the names of wrappers."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "").removeprefix("module.")


def _error(what: str, fix: str) -> ModelError:
    return ModelError(Problem(what, fix=fix))
