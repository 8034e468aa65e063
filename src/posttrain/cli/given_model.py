"""Models that a command line names: a folder, a run or checkpoint, a GGUF file, or a hub id."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from posttrain.errors import Problem, RequestError
from posttrain.plan.model_files import holds_model, is_hub_id

_CONFIGURATIONS = (".yaml", ".yml", ".json")


def names_model(word: str) -> bool:
    """Return True when a word of the command line is a model, rather than a configuration file or an override."""
    given = Path(word).expanduser()
    if given.is_dir() or word.endswith(".gguf"):
        return True
    return not word.startswith(("-", "~")) and is_hub_id(word) and "/" in word and not word.endswith(_CONFIGURATIONS)


def check_given(word: str) -> None:
    """Raises: RequestError for a model that cannot be there."""
    given = Path(word).expanduser()
    if given.exists():
        return
    if word.endswith(".gguf"):
        raise RequestError(Problem(f"there is no file {word}"))
    if not is_hub_id(word):
        raise RequestError(
            Problem(f"there is no folder {word}", fix="name a model folder, a run, or a hub id (org/name)")
        )


def name_of(word: str) -> str:
    """The name of a model, for the user."""
    given = Path(word).expanduser()
    return given.resolve().name if given.exists() else word


def is_run(word: str) -> bool:
    """Return True for a folder that holds no model itself: a run, a checkpoint."""
    given = Path(word).expanduser()
    return given.is_dir() and not holds_model(given)


def as_folder(word: str, folders: ExitStack, announce: Callable[[str], None], *, from_gguf: bool) -> str:
    """Return the path of a model that transformers loads; what has to be written for it is removed with ``folders``.

    The model of a run or checkpoint is exported, and with ``from_gguf`` a GGUF file is unpacked; paths and hub ids of other
    models are returned as they are. Imports torch where it writes. Raises: RequestError, ModelError.
    """
    check_given(word)
    given = Path(word).expanduser()
    if not given.exists():
        return word
    unpacked = from_gguf and word.endswith(".gguf")
    if not unpacked and not is_run(word):
        return str(given)
    out = Path(folders.enter_context(TemporaryDirectory(prefix="posttrain-model-"))) / name_of(word)
    announce(f"{'unpacking' if unpacked else 'exporting the model of'} {word}")
    if unpacked:
        from posttrain.models.chat import load_gguf

        model, tokenizer = load_gguf(given)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    else:
        from posttrain.run.export import export_checkpoint

        export_checkpoint(given, out)
    return str(out)
