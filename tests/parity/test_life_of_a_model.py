"""examples/life-of-a-model: its parts load, its solutions are right, and the whole runs on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.dialects.detect import read_config
from warm.client import WARM_CHILDREN
from warm.processes import warm_python

FOLDER = Path(__file__).parents[2] / "examples" / "life-of-a-model"


@pytest.mark.parametrize(
    ("file", "entry"),
    [("generate", "generate"), ("evaluate", "evaluate"), ("sft", "sft"), ("grpo", "train")],
)
def test_each_configuration_is_of_its_command(file: str, entry: str) -> None:
    loaded = read_config(str(FOLDER / f"{file}.yaml"), [], None).runnable()
    assert (loaded.entry, loaded.warnings) == (entry, ())


@pytest.mark.parametrize(
    ("expression", "solution"),
    [
        ("5 + 6 + 3", "5 + 6 = 11. 11 + 3 = 14. The answer is 14."),
        ("2 - 7 + 1", "2 - 7 = -5. -5 + 1 = -4. The answer is -4."),
    ],
)
def test_solutions_are_worked_step_by_step(expression: str, solution: str) -> None:
    spec = importlib.util.spec_from_file_location("worked_solutions", FOLDER / "worked_solutions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.worked(expression) == solution


@pytest.mark.slow
def test_the_whole_life_on_a_tiny_model_twice(tiny_llama: Path, tmp_path: Path) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "posttrain"
    words = ["exec", warm_python(), "-c", "from posttrain.cli.start import main; main()"]
    command.write_text(f'#!/bin/sh\n{shlex.join(words)} "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        WARM_CHILDREN: "1",
        "MODEL": str(tiny_llama),
        "TRAIN_ROWS": "32",
        "TEST_ROWS": "4",
        "STEPS": "1",
    }
    life = ["bash", str(FOLDER / "run.sh"), "life"]
    for _ in range(2):  # started again, it finds everything done
        subprocess.run(life, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=900)
    for name in ("base", "sft", "grpo"):
        results = json.loads((tmp_path / "life" / name / "results.json").read_text())
        assert results["sources"]["reasoning_gym/chain_sum"]["responses"] == 16
    page = (tmp_path / "life" / "report.html").read_text()
    assert "base · sft · grpo" in page
