"""A run under ``posttrain train --restarts`` that is killed again and again ends as one that nothing disturbs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import result, tiny_run

from posttrain.build.train import train_run
from posttrain.dialects.native.write import to_yaml
from warm.processes import WarmProcess


@pytest.mark.slow
def test_two_kills_change_nothing(tmp_path: Path, tiny_llama: Path) -> None:
    straight = train_run(tiny_run(tmp_path, tiny_llama, "straight", steps=20))
    killed = tmp_path / "killed"
    (tmp_path / "run.yaml").write_text(to_yaml(tiny_run(tmp_path, tiny_llama, "killed", steps=20)))
    command = [sys.executable, "-m", "posttrain", "train", str(tmp_path / "run.yaml"), "--restarts", "2"]
    told = tmp_path / "told.txt"
    with (
        told.open("wb") as errors,
        WarmProcess(command, stdout=subprocess.DEVNULL, stderr=errors, children=True) as supervisor,
    ):
        for step in (3, 9):
            while not (killed / f"samples/step_{step}.jsonl").exists():
                assert supervisor.poll() is None
                time.sleep(0.01)
            os.kill(json.loads((killed / "lock").read_text())["pid"], signal.SIGKILL)
        code, said = supervisor.wait(timeout=300), told.read_text()
    assert code == 0, said
    assert said.count("was killed by SIGKILL in step") == 2
    assert [json.loads(line)["restart"] for line in (killed / "restarts.jsonl").read_text().splitlines()] == [1, 2]
    assert result(killed) == result(straight)
