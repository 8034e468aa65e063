"""Completion, init, doctor --fix, exit codes, coloured differences and the page of environment variables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from posttrain.cli import doctor
from posttrain.cli.app import app
from posttrain.cli.init import METHODS, Answers, written
from posttrain.cli.report import difference_lines
from posttrain.dialects.entries import ENTRIES
from posttrain.dialects.native.loader import load
from posttrain.errors import RequestError

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_init_writes_a_file_without_problems(tmp_path: Path, method: str, lora: bool) -> None:
    file = tmp_path / "run.yaml"
    words = ["init", str(file), "--method", method, "--model", "org/it's", "--data", "my data.parquet", "--steps", "7"]
    words += ["--validation", "held.parquet", "--lora" if lora else "--full"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    text = file.read_text()
    assert text.count("#") > 8 and yaml.safe_load(text)["data"]["train_files"] == ["my data.parquet"]
    planned = CliRunner().invoke(app, ["plan", "--skip-files", str(file)])
    assert planned.exit_code == 0, planned.output
    config = load(str(file), [], ENTRIES["sft" if method == "sft" else "train"]).config
    assert config.model.path == "org/it's" and config.run.total_steps == 7 and (config.policy.lora is not None) == lora


def test_init_asks_for_nothing_without_a_terminal_and_names_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    done = CliRunner().invoke(app, ["init", str(file)])
    assert isinstance(done.exception, RequestError) and not file.exists()
    assert [problem.what for problem in done.exception.problems] == ["no model is given", "no data is given"]
    done = CliRunner().invoke(app, ["init", str(file), "--method", "grop"])
    assert "did you mean grpo?" in str(done.exception)
    done = CliRunner().invoke(app, ["init", str(file), "--model", "m", "--data", "d.jsonl", "--reward", "exactmatch"])
    assert "did you mean exact_match?" in str(done.exception) and not file.exists()
    file.write_text("")
    assert "exists" in str(CliRunner().invoke(app, ["init", str(file), "--model", "m", "--data", "d"]).exception)


def test_init_takes_a_reward_of_the_users() -> None:
    terms = yaml.safe_load(written(Answers(method="grpo", model="m", data="d", reward="my.py")))["reward"]["terms"]
    assert terms == [{"name": "score", "path": "my.py"}]


def test_a_shell_completes_commands() -> None:
    environment = os.environ | {"_POSTTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "posttrain pl", "COMP_CWORD": "1"}
    script = "import sys; sys.argv = ['posttrain']; from posttrain.cli.app import app; app(prog_name='posttrain')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert sorted(done.stdout.split()) == ["plan", "play"], done.stderr


def test_help_names_the_exit_codes() -> None:
    text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert all(f" {code} " in text.partition("Exit codes:")[2] for code in (0, 2, 3, 75, 130))


def test_doctor_prints_one_line_that_installs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name in ("bm25s", "vllm", "peft") else object())
    done = CliRunner().invoke(app, ["doctor", "--fix"])
    assert "pip install 'posttrain[lora,search]'" in done.output.splitlines()


def test_differences_of_runs_in_colours(tmp_path: Path) -> None:
    for name, rate in (("a", 0.25), ("b", 0.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps({"run": {"seed": 1}, "policy": {"lr": rate}}))
        (tmp_path / name / "run.json").write_text("{}")
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    first, line = difference_lines([tmp_path / "a", tmp_path / "b"])
    assert first == "1 settings differ:"
    assert line == "  policy.lr: \x1b[31m0.25\x1b[0m -> \x1b[32m0.5\x1b[0m"
    assert difference_lines([tmp_path / "a"]) == []


def test_every_variable_that_is_read_is_on_the_page() -> None:
    page = (ROOT / "docs/environment-variables.md").read_text()
    read = re.compile(r'environ(?:ment)?(?:\.get\(|\.setdefault\(|\[)"([A-Z][A-Z0-9_]+)"')
    found = {name for file in SOURCES for name in read.findall(file.read_text(encoding="utf-8"))}
    found |= {
        name for file in SOURCES for name in re.findall(r'"(POSTTRAIN_[A-Z_]+)"', file.read_text(encoding="utf-8"))
    }
    assert len(found) > 12
    # The system's own, and the mark of worker processes, which is nobody's to set
    assert {name for name in found if f"`{name}`" not in page} <= {"PATH", "PYTHONPATH", "POSTTRAIN_WORKER"}
