"""`posttrain checkpoints` lists what is here and what is elsewhere."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.errors import RequestError
from posttrain.libraries.remote import RemoteFolder
from posttrain.run.durable import write_manifest


def listed(place: object) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["checkpoints", str(place)], catch_exceptions=False)
    return result.exit_code, result.stdout.splitlines()


def make(folder: Path) -> int:
    """A checkpoint; its size."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    write_manifest(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def test_here(tmp_path: Path) -> None:
    size = make(tmp_path / "checkpoints/global_step_2")
    make(tmp_path / "checkpoints/global_step_10")
    (tmp_path / "checkpoints/global_step_10/run.json").write_text("[]")
    whole = f"global_step_2  {size:,} bytes  whole"
    assert listed(tmp_path) == (
        0,
        [whole, f"global_step_10  {size:,} bytes  damaged: run.json has changed"],
    )
    assert listed(tmp_path / "checkpoints")[1][0] == whole
    (tmp_path / "empty").mkdir()
    assert listed(tmp_path / "empty") == (1, [])
    with pytest.raises(RequestError, match="nowhere does not exist; name a run folder"):
        listed(tmp_path / "nowhere")


def test_elsewhere(tmp_path: Path) -> None:
    size = make(tmp_path / "global_step_2")
    folder = RemoteFolder("memory://listed/run")
    for path in (tmp_path / "global_step_2").iterdir():
        folder.put(path, f"global_step_2/{path.name}")
    folder.write("global_step_4/run.json", b"{}")
    try:
        lines = [f"global_step_2  {size:,} bytes  whole", "global_step_4  2 bytes  not finished"]
        assert listed("memory://listed/run") == (0, lines)
    finally:
        fsspec.filesystem("memory").store.clear()


def test_a_url_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="s33:// is not known"):
        listed("s33://bucket/run")
