"""The last line of a plan, and the file of a translation that lost something."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from posttrain.cli.app import main
from posttrain.cli.verdict import verdict
from posttrain.dialects.detect import read_config
from posttrain.errors import Problem

Run = Callable[..., tuple[int, str, str]]
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PLAIN = (
    *("--dialect", "verl", "data.train_files=a.parquet", "algorithm.adv_estimator=grpo", f"{R}.n=4"),
    *(f"{A}.ppo_micro_batch_size_per_gpu=8", f"{R}.log_prob_micro_batch_size_per_gpu=8"),
)
SAMPLED = (
    *("reward_model.enable=True", "reward_model.model.path=judge", "reward_model.micro_batch_size_per_gpu=8"),
    "+reward_model.model.type=generative",
)
JUDGE = f"+{R}.chat_scheduler=mine.py"


@pytest.fixture
def posttrain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``posttrain ARGUMENTS``: (exit code, stdout, stderr without line breaks)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, " ".join(shown.err.split())

    return run


def test_a_plan_ends_with_what_it_comes_to(posttrain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = posttrain("plan", "--skip-files", "--here", *PLAIN)
    assert (code, out.splitlines()[-1]) == (0, "trains here")
    monkeypatch.setattr("posttrain.config.checks.rollout.is_installed", lambda library: False)
    code, out, _ = posttrain("plan", "--skip-files", *PLAIN)
    assert (code, out.splitlines()[-1]) == (0, "trains on 8 devices with fsdp, vllm; not installed here: vllm")


def test_a_plan_of_what_does_not_train_exits_with_2_and_lists_why(posttrain: Run) -> None:
    code, out, _ = posttrain("plan", "--skip-files", "--here", *PLAIN, *SAMPLED)
    *_, line, reason = out.splitlines()
    assert (code, line) == (2, "does not train: 1 thing")
    assert reason.startswith("  1. reward_model.model.type is planned")


def test_programs_read_the_same(posttrain: Run) -> None:
    arguments = ("plan", "--skip-files", "--here", "--json", *PLAIN)
    code, out, _ = posttrain(*arguments)
    assert (code, json.loads(out)["trains"], json.loads(out)["verdict"]) == (0, True, "trains here")
    code, out, _ = posttrain(*arguments, *SAMPLED)
    assert (code, json.loads(out)["trains"]) == (2, False)
    code, out, err = posttrain(*arguments, f"{A}.ppo_mini_batch_size=3", f"{A}.optim.lr=high")
    plan = json.loads(out)
    assert (code, plan["trains"], plan["verdict"]) == (2, False, "refused: 2 problems")
    assert [problem["key"] for problem in plan["problems"]] == [f"{A}.ppo_mini_batch_size", f"{A}.optim.lr"]
    assert "2 problems, and nothing was started" in err


def test_other_entry_points_have_their_own_verb(posttrain: Run, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {files: [a.jsonl]}\nreward: {terms: [{name: exact_match}]}\n")
    code, out, _ = posttrain("plan", "--skip-files", str(tmp_path / "run.yaml"), "output.folder=out")
    assert (code, out.splitlines()[-1]) == (0, "evaluates here")


def test_a_library_that_is_not_installed_is_no_reason() -> None:
    loaded = read_config(None, ["model.path=m", "data.train_files=[a]"], "native")
    found = verdict(replace(loaded, unsupported=(Problem("x", library="vllm"),)), 2)
    assert found.trains and found.line() == "trains on 2 devices with native; not installed here: vllm"


def test_a_translation_keeps_what_it_lost(posttrain: Run, tmp_path: Path) -> None:
    code, out, err = posttrain("translate", "--here", *PLAIN, *SAMPLED, JUDGE)
    assert code == 0 and "not translated: actor_rollout_ref.rollout.chat_scheduler is refused" in err
    assert [entry["key"] for entry in yaml.safe_load(out)["untranslated"]] == [
        f"{R}.chat_scheduler",
        "reward_model.model.type",
    ]
    file = tmp_path / "native.yaml"
    file.write_text(out)
    code, out, _ = posttrain("plan", "--skip-files", str(file))
    assert (
        code == 2 and "does not train: 2 things" in out and "not translated: reward_model.model.type is planned" in out
    )
    code, out, _ = posttrain("plan", "--skip-files", str(file), "untranslated=[]")
    assert code == 0 and out.splitlines()[-1] == "trains here"
    file.write_text(file.read_text().replace("- key: ", "- word: "))
    code, _, err = posttrain("plan", "--skip-files", str(file))
    assert code == 2 and "untranslated must be a list of {key: ..., reason: ...}" in err


def test_a_translation_without_loss_has_no_such_section(posttrain: Run) -> None:
    code, out, _ = posttrain("translate", "--here", *PLAIN)
    assert code == 0 and "untranslated" not in out
    assert out.startswith("# yaml-language-server: $schema=posttrain.schema.json\n")
