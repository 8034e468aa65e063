"""Ctrl-C before the first step: no traceback, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from runs import tiny_run


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.1, 0.3, 0.8, 2.0, 4.0])
def test_interrupted_while_it_starts(tmp_path: Path, tiny_llama: Path, after_s: float) -> None:
    """The process says "." when Python itself is up; what comes before is not ours."""
    config = tiny_run(tmp_path, tiny_llama, "run", steps=1000)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    # A shell lets what it starts in the background ignore SIGINT, and so would this process: as at a terminal, it does not.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heeds}; from posttrain.cli.start import main; import sys; print('.', flush=True); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == ".\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert "Traceback" not in output
    assert process.returncode in (-signal.SIGINT, 130, 75), output  # 75: on a fast machine it was already running
    assert not (tmp_path / "run/lock").exists()
