"""Export a checkpoint, ours or one of another trainer's shards, as a plain Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.logging import disable_progress_bar

from posttrain.errors import ModelError, Problem, RequestError
from posttrain.libraries.disk_errors import disk_error
from posttrain.libraries.folders import make_folder
from posttrain.models.chunks import WEIGHT_CHUNKS, ChunkedTensors
from posttrain.models.loading import auto_class, first_line, load_model_config
from posttrain.models.lora import CONFIG as ADAPTER
from posttrain.models.merging import merge_saved_adapter
from posttrain.models.precision import convert_weights
from posttrain.models.saving import save_model
from posttrain.models.shards import has_shards, merge_shards
from posttrain.models.value_head import sequence_classifier, token_classifier
from posttrain.run.checkpoint_folders import COUNTERS, OPTIMIZER, PREFIX, resolve_checkpoint
from posttrain.run.durable import different, same_mode

Role = Literal["policy", "critic"]
# What a training engine keeps beside the Hugging Face files.
ENGINE_FILES = (OPTIMIZER, COUNTERS)
# Other trainers: the folder of each role, and the file that names their newest step.
ROLE_FOLDERS: dict[Role, tuple[str, ...]] = {"policy": ("actor", "policy"), "critic": ("critic",)}
STEP_FILES = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")


def export_checkpoint(checkpoint: Path, out: Path, role: Role = "policy", dtype: str | None = None) -> Path:
    """Write a model of a checkpoint (or of a run's newest valid one) as a folder that transformers loads: the policy as a
    causal language model, the critic as a token classification model with one label, a tuned reward model as a sequence
    classification model with one label (token classification where its head has a bias).

    Our checkpoints hold such a folder with the float32 masters, which is copied and compared by hash, or an adapter, which is
    merged into its base model, or what every process has written of the masters, which is put together. Shards of verl and
    SkyRL are merged in the precision they were saved in. A merged folder's logits are compared with those of the merged model.
    With ``dtype`` (float32, bfloat16, float16) the weights are then rounded to it. Returns the folder that was taken.

    Raises: RequestError when there is no valid checkpoint, it has no such model, or ``out`` exists and is not an empty folder.
    """
    disable_progress_bar()
    shards = find_shards(checkpoint, role)
    source = shards or resolve_checkpoint(checkpoint)
    if not shards and not (source / role).is_dir():
        raise RequestError(Problem(f"{source} holds no {role}: its run had none", fix="leave --role out"))
    with _written_beside(out) as beside:
        if shards:
            _write_merged(_home_of(shards), merge_shards(shards), beside, role)
        elif (source / role / ADAPTER).is_file():
            beside.mkdir()
            merge_saved_adapter(source / role, beside)
        elif (source / role / WEIGHT_CHUNKS).is_dir():
            weights = dict(ChunkedTensors(source / role / WEIGHT_CHUNKS))
            _write_merged(source / role, weights, beside, role, dtype=torch.float32)
        else:
            shutil.copytree(source / role, beside, ignore=shutil.ignore_patterns(*ENGINE_FILES))
            if changed := different(beside, source, role):
                raise RequestError(
                    Problem(f"{changed} changed while it was copied to {out}", fix="look after that disk")
                )
        if dtype is not None:
            convert_weights(beside, dtype)
        same_mode(beside)
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


def _home_of(shards: Path) -> Path:
    """The folder with the configuration and the tokenizer of another trainer's shards."""
    home = next((place for place in (shards / "huggingface", shards) if (place / "config.json").is_file()), None)
    if home is None:
        what = f"there is no config.json in {shards} or its folder huggingface"
        raise ModelError(Problem(what, fix="copy the model's config and tokenizer files there"))
    return home


def _write_merged(
    home: Path, weights: Mapping[str, Tensor], out: Path, role: Role, *, dtype: torch.dtype | None = None
) -> None:
    """Whole weights with the configuration and the tokenizer in ``home``, in their own precision or another."""
    model = _model_of(home, weights, role, dtype)
    save_model(model, out)
    # Made up from the configuration; what ``home`` has is copied
    (out / GENERATION_CONFIG_NAME).unlink(missing_ok=True)
    for path in home.iterdir():  # tokenizer, template, generation config
        kept = path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in ENGINE_FILES
        if path.is_file() and kept and not (out / path.name).exists():
            shutil.copy(path, out / path.name)
    _compare_logits(model, out)


def _model_of(home: Path, weights: Mapping[str, Tensor], role: Role, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model with these weights.

    Raises: ModelError when transformers does not know it, or names and shapes are not its own.
    """
    config = load_model_config(str(home))
    make: Callable[..., PreTrainedModel] = auto_class(config).from_config
    saved_as = (getattr(config, "architectures", None) or [""])[0]
    if saved_as.endswith("ForSequenceClassification"):  # a reward model
        make, config.num_labels = sequence_classifier(config, str(home), "")._from_config, 1
    # A critic, or a reward model whose head has a bias
    elif role == "critic" or saved_as.endswith("ForTokenClassification"):
        make, config.num_labels = token_classifier(config, str(home), "")._from_config, 1
    config.architectures = None  # FSDP1 puts its own name before the class's
    dtype = dtype or next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    try:
        model = make(config, dtype=dtype)
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
    """Check that the model that transformers loads from the folder computes what the merged one computes, bit for bit."""
    loaded: Any = type(model).from_pretrained(folder, dtype=model.dtype)
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (2, 16), generator=torch.Generator().manual_seed(0))
    if not torch.equal(model(input_ids=ids).logits, loaded.eval()(input_ids=ids).logits):
        raise ModelError(Problem(f"the model read back from {folder} computes other logits than the shards"))


@contextmanager
def _written_beside(out: Path) -> Iterator[Path]:
    """A path beside ``out`` that takes its place when all went well, and is removed when not.

    Raises: OSError that names a file where a disk fails, in whatever way a library reports it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fix = "name a folder that does not exist yet"
        raise RequestError(Problem(f"{out} exists and is not an empty folder", fix=fix))
    make_folder(out.parent)
    beside = out.with_name(out.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        yield beside
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if (found := disk_error(error)) is None:
            raise
        raise OSError(found.errno, found.strerror, found.filename or str(out)) from error
    if out.exists():
        out.rmdir()
    os.replace(beside, out)
