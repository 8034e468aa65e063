"""Compile a C++ source for this processor, once: the library is kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from posttrain.libraries.compilers import find_compiler
from posttrain.libraries.folders import user_cache
from posttrain.libraries.processor import multiplies_bfloat16_slowly, multiplies_int16_faster, processor

SHARED_HEADERS = Path(__file__).parent
# The processor's own instructions; IEEE floating-point numbers, except for errno and traps, which are unused.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-fopenmp")
COMPILE_TIMEOUT_S = 120


@cache
def compiled_library(source: Path) -> ctypes.CDLL | str:
    """Load the library compiled from ``source``, whose headers are beside it or beside this file. Returns: it, or why not."""
    compiler = find_compiler()
    if compiler is None:
        return "no C++ compiler was found (install g++)"
    try:
        return ctypes.CDLL(str(_compiled(source, compiler, user_cache() / "kernels")))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return f"{compiler} does not compile {source.name}: {lines[0] if lines else f'status {error.returncode}'}"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return f"{source.name} cannot be compiled by {compiler}: {error}"


def _compiled(source: Path, compiler: str, folder: Path) -> Path:
    """Return the shared library, compiled by the first process that needs it for this source, compiler and processor."""
    version = _run([compiler, "--version"])
    headers = sorted({*source.parent.glob("*.h"), *SHARED_HEADERS.glob("*.h")})
    defined = {"SLOW_PAIRS": multiplies_bfloat16_slowly(), "FAST_INT16": multiplies_int16_faster()}
    flags = [*FLAGS, *(f"-D{name}" for name, holds in defined.items() if holds)]
    texts = "\n".join([*flags, version, processor()])
    key = hashlib.sha256(b"".join(file.read_bytes() for file in (source, *headers)) + texts.encode())
    path = folder / f"{key.hexdigest()[:32]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        made = Path(beside) / path.name
        _run([compiler, *flags, f"-I{SHARED_HEADERS}", "-shared", "-fPIC", str(source), "-o", str(made)])
        os.replace(made, path)  # atomic: other processes may do the same
    return path


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S).stdout
