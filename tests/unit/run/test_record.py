"""Rows of metrics.jsonl that are lost are named, and what can be kept is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.backends.tracking.jsonl import Jsonl
from posttrain.config import RunConfig
from posttrain.run.record import lost_rows, read_metrics
from posttrain.run.run_folder import RunFolder


def rows(path: Path, *steps: int) -> None:
    path.write_text("".join(json.dumps({"step": step, "reward/mean": 0.5}) + "\n" for step in steps))


def test_nothing_is_said_of_a_whole_file(tmp_path: Path) -> None:
    rows(tmp_path / "metrics.jsonl", 0, 1, 2, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # killed here
    assert lost_rows(tmp_path, 1, 3) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_missing_rows_are_named(tmp_path: Path) -> None:
    rows(tmp_path / "metrics.jsonl", 1, 4, 7)
    [text] = lost_rows(tmp_path, 1, 8)
    assert "metrics.jsonl lacks the rows of steps 2 to 3, 5 to 6, 8; these steps are done" in text
    (tmp_path / "metrics.jsonl").unlink()
    [text] = lost_rows(tmp_path, 5, 5)
    assert "metrics.jsonl is gone, and with it the rows of step 5; " in text


@pytest.mark.parametrize(
    "broken", [b"\xff\xfe garbage", b'{"step": "two"}', b"[1, 2]", b'{"no": 1}', b'{"step": 2, \xff}']
)
def test_a_damaged_file_is_kept_and_its_good_rows_stay(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    rows(path, 1, 2, 3)
    lines = path.read_bytes().splitlines()
    lines[1] = broken
    path.write_bytes(b"\n".join(lines) + b"\n")
    texts = lost_rows(tmp_path, 1, 3)
    assert "has 1 damaged line; it is kept as metrics.damaged_1.jsonl" in texts[0] and "the rows of step 2;" in texts[1]
    assert (tmp_path / "metrics.damaged_1.jsonl").read_bytes() == path.read_bytes()
    config = RunConfig.model_validate({"model": {"path": "a"}, "data": {"train_files": "b"}})
    tracker = Jsonl(tmp_path)
    tracker.begin(config, 5, 4)
    tracker.close()
    assert [step for step, _ in read_metrics(path).rows] == [1, 3] and read_metrics(path).damaged == 0


def test_a_resumed_run_says_what_is_lost(tmp_path: Path) -> None:
    tree = {"model": {"path": "a"}, "data": {"train_files": "b"}, "run": {"folder": str(tmp_path)}}
    RunFolder(RunConfig.model_validate(tree)).begin(first_step=1, total_steps=9, device="cpu")
    rows(tmp_path / "metrics.jsonl", 1, 3)
    again = RunFolder(RunConfig.model_validate(tree))
    assert again.begin(first_step=4, total_steps=9, device="cpu") == []
    assert len(again.notes) == 1 and "the rows of step 2" in again.notes[0]
    assert json.loads((tmp_path / "run.json").read_text())["lost"] == again.notes


def test_a_lost_configuration_is_reported(tmp_path: Path) -> None:
    tree = {"model": {"path": "a"}, "data": {"train_files": "b"}, "run": {"folder": str(tmp_path)}}
    first = RunFolder(RunConfig.model_validate(tree))
    first.begin(first_step=1, total_steps=9, device="cpu")
    (tmp_path / "config.yaml").write_text("a: [1")
    again = RunFolder(RunConfig.model_validate(tree))
    [note] = again.check(holds_checkpoint=True)
    assert note == f"{tmp_path / 'config.yaml'} is gone or damaged, and changes to it cannot be noticed"
    first.claim_checkpoints()
    [note] = again.check(holds_checkpoint=True)
    assert "is gone or damaged, compared with owner.json" in note
