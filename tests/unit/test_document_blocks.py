"""Every block of the documents does what its page shows: quick ones here, runs in tests/parity/test_document_runs.py."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from documents import LANGUAGES, ROOT, Block, all_blocks
from posttrain.cli.app import main
from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import ENTRIES
from posttrain.plan.timing.machine_file import read_machine
from posttrain.registry import ADVANTAGES

BLOCKS = all_blocks()
# What a configuration needs besides the keys that a page shows.
LEAST = {
    "train": ["model.path=m", "data.train_files=[a.parquet]"],
    "sft": ["model.path=m", "data.train_files=[a.parquet]"],
    "tune": ["model.path=m", "data.train_files=[a.parquet]"],
    "generate": ["model.path=m", "data.files=[a.parquet]", "output.file=o.parquet"],
    "evaluate": ["data.files=[a.parquet]", "output.folder=o"],
}


def of(language: str, *, quick: bool = True) -> list[object]:
    chosen = [each for each in BLOCKS if each.language == language and each.runs and each.quick == quick]
    assert chosen
    return [pytest.param(each, id=each.place) for each in chosen]


def row_17(folder: Path) -> None:
    """A file of prompts, the seventeenth of which (from 0) has no messages."""
    rows = [{"prompt": [{"role": "user", "content": "q"}] * (n != 17), "data_source": "s"} for n in range(20)]
    rows = [row | {"reward_model": {"ground_truth": "1"}} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def images(folder: Path) -> None:
    """A file of prompts with images: the second one of row 17 ends early, and row 20 has a place for one more."""
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "PNG")
    rows = []
    for n in range(22):
        images = [whole.getvalue()] + [whole.getvalue()[:1500]] * (n == 17)
        content = "<image> <image>" if n in (17, 20) else "<image>"
        row = {"prompt": [{"role": "user", "content": content}], "images": [{"bytes": each} for each in images]}
        rows.append(row | {"data_source": "s", "reward_model": {"ground_truth": "1"}})
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def roll_file(folder: Path) -> None:
    """A file of ROLL's whose line 31 has 24 steps of accumulation, for 64 x 8 sequences on 16 devices."""
    lines = ["rollout_batch_size: 64", "num_return_sequences_in_group: 8", "pretrain: m", "actor_train:"]
    lines += ["  data_args: {file_name: [a.jsonl]}", "  device_mapping: list(range(0,16))", "  training_args:"]
    lines += ["    per_device_train_batch_size: 1"]
    lines += ["#"] * (30 - len(lines)) + ["    gradient_accumulation_steps: 24"]
    (folder / "run.yaml").write_text("\n".join(lines) + "\n")


SETUPS = {"row 17": row_17, "images": images, "ROLL's file": roll_file}


def keep(block: Block, folder: Path) -> None:
    """Write the blocks of the page that are kept as files, up to this one."""
    for each in BLOCKS:
        if each.page == block.page and each.line <= block.line and "file" in each.marks:
            (folder / each.marks["file"]).write_text(each.text, encoding="utf-8")


@pytest.mark.parametrize("block", [pytest.param(each, id=each.place) for each in BLOCKS])
def test_a_block_has_a_language(block: Block) -> None:
    assert block.language in LANGUAGES
    if block.language == "text" and not {"printed by", "not printed"} & block.marks.keys():
        assert re.search(r"…|\[--", block.text), "say by which command it is printed, or why by none"


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_a_configuration(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep(block, tmp_path)
    tree = yaml.safe_load(block.text)
    for name in reversed(block.marks.get("inside", "").split(".")):
        tree = {name: tree} if name else tree
    entry = block.marks.get("entry", "train")
    file = tmp_path / "shown.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    if entry == "machine":
        assert read_machine(str(file)).devices == tree["nodes"] * tree["devices_per_node"]
        return
    given = {f"{section}.{key}" for section, keys in tree.items() if isinstance(keys, dict) for key in keys}
    missing = [each for each in LEAST[entry] if each.split("=")[0] not in given]
    if "environment.train_episodes" in given:
        missing = ["model.path=m"]
    loaded = read_config(str(file), missing, "native", entry=ENTRIES[entry])
    assert [str(problem) for problem in loaded.problems] == []


@pytest.mark.parametrize("block", of("json"))
def test_json_is_json(block: Block) -> None:
    assert json.loads(block.text.rstrip().rstrip(","))


@pytest.mark.parametrize("block", of("csv"))
def test_csv_has_the_columns_of_its_head(block: Block) -> None:
    rows = list(csv.DictReader(io.StringIO(block.text)))
    assert rows and all(None not in row and None not in row.values() for row in rows)


@pytest.mark.parametrize("block", of("python"))
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep(block, tmp_path)
    for kept in ("_entries", "_stated"):  # nothing that a page registers outlives the test
        monkeypatch.setattr(ADVANTAGES, kept, dict(getattr(ADVANTAGES, kept)))
    names: dict[str, object] = {"__name__": "shown"}
    exec(compile(block.text, block.place, "exec"), names)  # noqa: S102 (the documents' own code)
    assert len(names) > 2


@pytest.mark.parametrize("block", [pytest.param(each, id=each.place) for each in BLOCKS if "printed by" in each.marks])
def test_a_text_is_what_its_command_prints(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keep(block, tmp_path)
    if "with" in block.marks:
        SETUPS[block.marks["with"]](tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(block.marks["printed by"]))
    with pytest.raises(SystemExit):
        main()
    printed = " ".join("".join(capsys.readouterr()).split())
    for part in block.text.split("…"):  # what a page leaves out
        assert " ".join(part.split()) in printed


@pytest.mark.parametrize("block", of("bash"))
def test_quick_commands_run(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "examples", tmp_path / "examples")
    for words in block.commands:
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None), capsys.readouterr().err
