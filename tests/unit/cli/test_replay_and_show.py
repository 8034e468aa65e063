"""posttrain replay and posttrain show at the command line: what they print, and what they say to wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.build import replay as build_replay
from posttrain.build.replay import Difference
from posttrain.cli import replay
from posttrain.cli.app import app
from posttrain.cli.errors import run_guarded


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run_guarded(lambda: app([str(one) for one in arguments], standalone_mode=False))
    out, err = capsys.readouterr()
    return code, out, " ".join(err.split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("posttrain.cli.process.prepare", lambda config: None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {train_files: [a.jsonl]}\n")
    return tmp_path


class TestReplay:
    def test_differences_are_counted_and_listed(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        asked: list[Any] = []

        def train(run: Path, config: Any, step: int | None) -> tuple[int, list[Difference]]:
            asked.append((run, config.loss.kl_coef, config.folder, step))
            numbers = [Difference(name=f"n{number}", recorded=1.0, now=2.0) for number in range(replay.SHOWN + 2)]
            return 7, [Difference(name="policy/loss", recorded=0.5, now=0.5), *numbers]

        monkeypatch.setattr(build_replay, "replay_train", train)
        out_file = folder / "out.jsonl"
        code, out, err = command(capsys, "replay", "train", folder, "loss.kl_coef=0.5", "--out", out_file)
        assert (code, err) == (0, "")
        assert asked == [(folder, 0.5, str(folder), None)]
        first, second, *_, last = out.splitlines()
        assert first == "1 of 23 metrics of the update of step 7 are the same"
        assert second == "  n0: 1.0 -> 2.0" and last == "  and 2 more"
        rows = [json.loads(line) for line in out_file.read_text().splitlines()]
        assert len(rows) == 23 and rows[0] == {"name": "policy/loss", "recorded": 0.5, "now": 0.5}

    def test_what_a_model_wrote_is_printed_as_data(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = [Difference(name="a/0", recorded=None, now="\x1b[2J" + "x" * 100)]
        monkeypatch.setattr(build_replay, "replay_rollout", lambda run, config, step: found)
        code, out, _ = command(capsys, "replay", "rollout", folder, "--step", "3")
        assert code == 0
        assert out.splitlines() == [
            "0 of 1 responses of step 3 are the same",
            f'  a/0: null -> "\\u001b[2J{"x" * 47}...',  # 60 characters: " + 9 + 47 + ...
        ]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["train", "{}/nowhere"], "nowhere does not exist"),
            (["train", "{}", "loss.kl_coff=1"], "there is no key loss.kl_coff"),
            (["train", "{}", "--stop", "1"], "there is no option --stop"),
            (["rewards", "{}", "--step", "4"], "has no samples of a training at step 4; there are none"),
            (["rewards", "{}", "--step", "4", "reward.model={path: m}"], "a reward model is not asked again"),
            (["rollout", "{}", "--step", "4"], "has no samples of a training at step 4"),
            (["train", "{}", "--step", "4"], "there is no recorded batch"),
        ],
    )
    def test_wrong_input_is_told(
        self, folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
    ) -> None:
        code, out, err = command(capsys, "replay", *(one.replace("{}", str(folder)) for one in arguments))
        assert (code, out) == (2, "")
        assert said in err and "Traceback" not in err

    def test_a_folder_without_its_configuration(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "config.yaml").unlink()
        code, _, err = command(capsys, "replay", "train", folder)
        assert code == 2 and "there is no config.yaml in" in err


class TestShow:
    def test_it_needs_a_terminal(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = command(capsys, "show", folder)
        assert code == 2 and "needs a terminal for its input and output" in err and "posttrain report" in err

    def test_validation_belongs_to_a_step(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = command(capsys, "show", folder, "--validation")
        assert code == 2 and "add --step N" in err

    def test_a_step_without_samples(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        code, _, err = command(capsys, "show", folder, "--step", "4")
        assert code == 2 and "has no samples of a training at step 4; there are none" in err
        code, _, err = command(capsys, "show", folder / "nowhere")
        assert code == 2 and "does not exist" in err

    def test_without_its_library(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("posttrain.cli.show.is_installed", lambda library: False)
        code, _, err = command(capsys, "show", folder)
        assert code == 2
        assert err.endswith("textual is not installed (needed by posttrain show); pip install 'posttrain[show]'")
