"""Importing the package, and everything that `posttrain plan` needs, stays cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


# Modules that the start of a command must not import, because it has no use for them
UNUSED = {
    "version": ["posttrain.config.schema", "posttrain.registry", "posttrain.cli.plan"],
    "doctor": ["posttrain.config.schema", "posttrain.cli.plan"],
    "plan": [
        "omegaconf",
        "hydra",
        "posttrain.cli.chat",
        "posttrain.config.evaluate",
        "posttrain.config.generate",
        "posttrain.config.serve",
        "posttrain.dialects.scripts.launch",
        "posttrain.sandbox",
    ],
}
COMMANDS = [
    "version",
    "doctor",
    "plan examples/grpo_chain_sum.yaml --skip-files",
    "plan examples/ppo_chain_sum.yaml --skip-files",
    "plan examples/sft_chain_sum.yaml --skip-files",
    "plan examples/verl_ppo.yaml --skip-files",
    "plan examples/roll_rlvr.yaml --skip-files",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_imports_nothing_that_it_does_not_use(line: str) -> None:
    script = (
        "import contextlib, io, sys\n"
        f"sys.argv = ['posttrain', *{line.split()!r}]\n"
        "from posttrain.cli.start import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "assert out.getvalue()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    imported = sorted(set(UNUSED[line.split()[0]]) & set(done.stdout.split()))
    assert not imported


RAY = "posttrain.backends.runtime.ray"


# A worker of Ray answers before it loads the libraries of its roles
TORCH_FREE = (
    "posttrain.config",
    "posttrain.registry",
    "posttrain.records.plans",
    f"{RAY}.worker",
    f"{RAY}.assignment",
    f"{RAY}.watch",
)


def test_torch_free_modules_load_no_torch() -> None:
    """One after the other in one Python, which stops at the first that does."""
    script = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    script += "    assert sys.modules.keys().isdisjoint({'torch', 'transformers'}), name\n    print(name)"
    done = subprocess.run([sys.executable, "-c", script, *TORCH_FREE], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == list(TORCH_FREE), done.stderr


def test_listing_names_of_every_registry_loads_no_torch() -> None:
    statement = (
        "import posttrain.registry as r\n"
        "registries = [value for value in vars(r).values() if isinstance(value, r.Registry)]\n"
        "assert registries and all(registry.names() for registry in registries), registries"
    )
    assert modules_loaded_by(statement).isdisjoint({"torch", "transformers"})


def test_the_check_sees_a_heavy_import() -> None:
    assert "numpy" in modules_loaded_by("import numpy")
