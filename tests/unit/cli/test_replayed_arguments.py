"""The arguments of posttrain train --replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.train import replayed
from posttrain.errors import RequestError

OWN = ["checkpoint.folder=null", "checkpoint.upload=null", "run.resume_path=null"]


def test_the_configuration_is_the_runs_and_the_folder_is_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert replayed(run, []) == [f"{run}/config.yaml", f"run.folder={run}_replay", *OWN]
    assert replayed(run, ["my.yaml", "run.folder=x"]) == ["my.yaml", "run.folder=x", *OWN]
    with pytest.raises(RequestError, match="is the run that is replayed"):
        replayed(run, [f"run.folder={run}"])
