"""From a checkpoint, ours or one of another trainer's shards, to a plain Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from posttrain.errors import ModelError, Problem, RequestError
from posttrain.models.loading import auto_class, first_line, load_model_config
from posttrain.models.lora import CONFIG as ADAPTER
from posttrain.models.lora import merge_saved_adapter
from posttrain.models.saving import save_model
from posttrain.models.shards import has_shards, merge_shards
from posttrain.stages.checkpoint_folders import COUNTERS, OPTIMIZER, PREFIX, resolve_checkpoint
from posttrain.stages.durable import different

Role = Literal["policy", "critic"]
# What a training engine keeps beside the Hugging Face files.
ENGINE_FILES = (OPTIMIZER, COUNTERS)
# Other trainers: the folder of each role, and the file that names their newest step.
ROLE_FOLDERS: dict[Role, tuple[str, ...]] = {"policy": ("actor", "policy"), "critic": ("critic",)}
STEP_FILES = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")


def export_checkpoint(checkpoint: Path, out: Path, role: Role = "policy") -> Path:
    """Write a model of a checkpoint (or of a run's newest valid one) as a folder that transformers loads: the policy as a
    causal language model, the critic as a token classification model with one label.

    Our checkpoints hold such a folder with the float32 masters, which is copied and compared by hash, or an adapter, which is
    merged into its base model. Shards of verl and SkyRL
    are merged in the precision they were saved in, and the folder's logits are compared with those of the merged model.
    Returns the folder that was taken.

    Raises: RequestError when there is no valid checkpoint, it has no such model, or ``out`` exists and is not an empty folder.
    """
    shards = find_shards(checkpoint, role)
    source = shards or resolve_checkpoint(checkpoint)
    if not shards and not (source / role).is_dir():
        raise RequestError(Problem(f"{source} holds no {role}: its run had none", fix="leave --role out"))
    with _written_beside(out) as beside:
        if shards:
            _write_merged(shards, beside, role)
        elif (source / role / ADAPTER).is_file():
            beside.mkdir()
            merge_saved_adapter(source / role, beside)
        else:
            shutil.copytree(source / role, beside, ignore=shutil.ignore_patterns(*ENGINE_FILES))
            if changed := different(beside, source, role):
                raise RequestError(
                    Problem(f"{changed} changed while it was copied to {out}", fix="look after that disk")
                )
    return source


def find_shards(path: Path, role: Role = "policy") -> Path | None:
    """The folder of another trainer's shards that a path means: it, its checkpoint, or the newest of its run; None when
    there are none."""
    candidates = [path]
    for name in STEP_FILES:
        if (path / name).is_file() and (step := (path / name).read_text().strip()).isdecimal():
            candidates.append(path / f"{PREFIX}{step}")
    for folder in candidates:
        for place in (folder, *(folder / name for name in ROLE_FOLDERS[role])):
            if has_shards(place):
                return place
    return None


def _write_merged(shards: Path, out: Path, role: Role) -> None:
    home = next((place for place in (shards / "huggingface", shards) if (place / "config.json").is_file()), None)
    if home is None:
        what = f"there is no config.json in {shards} or its folder huggingface"
        raise ModelError(Problem(what, fix="copy the model's config and tokenizer files there"))
    weights = merge_shards(shards)
    model = _model_of(home, weights, role)
    save_model(model, out)
    for path in home.iterdir():  # tokenizer, template, generation config
        if path.is_file() and not (out / path.name).exists() and path.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copy(path, out / path.name)
    _compare_logits(model, out)


def _model_of(home: Path, weights: dict[str, Tensor], role: Role) -> PreTrainedModel:
    """The model with these weights.

    Raises: ModelError when transformers does not know it, or names and shapes are not its own.
    """
    config = load_model_config(str(home))
    kind = auto_class(config)
    if role == "critic":
        kind, config.num_labels = AutoModelForTokenClassification, 1
    config.architectures = None  # FSDP1 puts its own name before the class's
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    try:
        model: PreTrainedModel = kind.from_config(config, dtype=dtype)
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except (ValueError, RuntimeError) as error:
        raise ModelError(Problem(f"the shards are not of the model in {home}: {first_line(error)}")) from error
    tied = set(model.all_tied_weights_keys or {})
    wrong = [
        *(f"{name} is missing" for name in missing if name not in tied),
        *(f"{name} is extra" for name in unexpected),
    ]
    if wrong:
        raise ModelError(Problem(f"the shards are not of the model in {home}: {wrong[0]} ({len(wrong)} such names)"))
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def _compare_logits(model: PreTrainedModel, folder: Path) -> None:
    """What transformers loads from the folder must compute what the merged model computes, bit for bit."""
    loaded: Any = type(model).from_pretrained(folder, dtype=model.dtype)
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (2, 16), generator=torch.Generator().manual_seed(0))
    if not torch.equal(model(input_ids=ids).logits, loaded.eval()(input_ids=ids).logits):
        raise ModelError(Problem(f"the model read back from {folder} computes other logits than the shards"))


@contextmanager
def _written_beside(out: Path) -> Iterator[Path]:
    """A path beside ``out`` that takes its place when all went well, and is removed when not."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fix = "name a folder that does not exist yet"
        raise RequestError(Problem(f"{out} exists and is not an empty folder", fix=fix))
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        yield beside
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if out.exists():
        out.rmdir()
    os.replace(beside, out)
