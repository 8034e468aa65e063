"""Output folders that cannot be written into: one message that names them and exit code 2, whichever command it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.cli.app import main
from posttrain.models.tiny import write_tiny_model

Run = Callable[..., tuple[int, str]]

RUN = """
model: {path: ./model}
data: {train_files: rows.jsonl, prompts_per_step: 2, max_prompt_tokens: 64}
rollout: {samples_per_prompt: 2, max_response_tokens: 2}
run: {total_steps: 1, folder: done}
"""
SFT = """
model: {path: ./model}
data: {train_files: rows.jsonl, prompt_column: prompt, response_column: answer, sequences_per_step: 2}
"""
GENERATE = """
model: {path: ./model}
data: {files: rows.jsonl, max_prompt_tokens: 64}
rollout: {samples_per_prompt: 1, max_response_tokens: 2}
output: {column: new, file: x.parquet}
"""
EVALUATE = """
data: {files: rows.jsonl}
output: {folder: scored}
"""


@pytest.fixture
def posttrain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``posttrain ARGUMENTS``: (exit code, stderr)."""
    for name in ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # what prepare() sets does not outlive the test

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), " ".join(capsys.readouterr().err.split())

    return run


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "model")
    row = {
        "data_source": "openai/gsm8k",
        "prompt": "1+1=",
        "answer": "2",
        "reward_model": {"ground_truth": "2"},
        "responses": ["2", "3"],
    }
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    for name, text in (("run", RUN), ("sft", SFT), ("generate", GENERATE), ("evaluate", EVALUATE)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


@pytest.mark.parametrize("folder", ["/proc/x", "/proc"])
@pytest.mark.parametrize(
    "arguments",
    [
        "train run.yaml run.folder={}",
        "train run.yaml checkpoint.folder={}",
        "sft sft.yaml run.folder={}",
        "generate generate.yaml output.file={}/x.parquet",
        "evaluate evaluate.yaml output.folder={}",
        "data shapes {} --train-rows 2 --validation-rows 2",
    ],
)
def test_a_folder_that_cannot_be_made_is_named(arguments: str, folder: str, posttrain: Run, job: Path) -> None:
    code, err = posttrain(*arguments.format(folder).split())
    below = f"{folder}/x.parquet.parts" if arguments.startswith("generate") else folder
    assert code == 2, err
    assert f"nothing can be written into the folder {below}: No such file or directory; name another folder" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_export_and_report_name_it_too(posttrain: Run, job: Path) -> None:
    assert posttrain("train", "run.yaml")[0] == 0
    assert posttrain("evaluate", "evaluate.yaml")[0] == 0
    for arguments in (
        "export done /proc/x/y",
        "report done --out /proc/x/y.html",
        "report scored --out /proc/x/y.html",
    ):
        code, err = posttrain(*arguments.split())
        assert (code, err) == (
            2,
            "posttrain: nothing can be written into the folder /proc/x: No such file or directory; name another folder, or "
            "change who may write there",
        )
