"""Importing the package, and everything that `posttrain plan` needs, stays cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "pyarrow")


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level names in sys.modules of a new Python after ``statement``."""
    script = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_import_posttrain_loads_no_heavy_library() -> None:
    assert modules_loaded_by("import posttrain").isdisjoint(HEAVY)


def test_plan_loads_no_heavy_library_to_read_a_configuration() -> None:
    assert modules_loaded_by("import posttrain.cli.request").isdisjoint({*HEAVY, "PIL"})


RAY = "posttrain.backends.runtime.ray"


# A worker of Ray answers before it loads the libraries of its roles
@pytest.mark.parametrize(
    "module",
    [
        "posttrain.config",
        "posttrain.registry",
        "posttrain.records.plans",
        f"{RAY}.worker",
        f"{RAY}.assignment",
        f"{RAY}.watch",
    ],
)
def test_torch_free_modules_load_no_torch(module: str) -> None:
    assert modules_loaded_by(f"import {module}").isdisjoint({"torch", "transformers"})


def test_listing_names_of_every_registry_loads_no_torch() -> None:
    statement = (
        "import posttrain.registry as r\n"
        "registries = [value for value in vars(r).values() if isinstance(value, r.Registry)]\n"
        "assert registries and all(registry.names() for registry in registries), registries"
    )
    assert modules_loaded_by(statement).isdisjoint({"torch", "transformers"})


def test_the_check_sees_a_heavy_import() -> None:
    assert "numpy" in modules_loaded_by("import numpy")
