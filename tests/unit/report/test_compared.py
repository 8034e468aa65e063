"""Several runs on one page, and what is told of single tokens and phases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RequestError
from posttrain.report import embedded, html
from posttrain.report.contents import labels, page_data
from posttrain.report.differences import differences
from posttrain.report.html import read_runs, write_report
from posttrain.report.read import read_run, read_timeline, token_rows


def small(folder: Path, name: str = "", rows: list[dict[str, Any]] | None = None, config: str = "") -> Path:
    """A run folder with these lines in metrics.jsonl."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or [{"step": 1, "a/b": 1.0}]))
    (folder / "run.json").write_text(json.dumps({"name": name or folder.name}))
    (folder / "config.yaml").write_text(config)
    return folder


def test_differences_are_the_settings_that_are_not_the_same_everywhere() -> None:
    first = {"policy": {"lr": 1e-5, "betas": [0.9, 0.95]}, "run": {"seed": 1, "name": "a"}, "reward": {}}
    second = {"policy": {"lr": 1e-5, "betas": [0.9, 0.99]}, "run": {"seed": 1}, "reward": {"clip": None}}
    assert differences([first, second]) == [
        ("policy.betas", ["[0.9, 0.95]", "[0.9, 0.99]"]),
        ("run.name", ['"a"', None]),  # not set in the second
        ("reward", ["{}", None]),
        ("reward.clip", [None, "null"]),  # set, to nothing
    ]
    assert differences([first]) == differences([first, first, first]) == []


def test_runs_are_told_apart_by_name_folder_or_number(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    a, b = small(tmp_path / "a", "one"), small(tmp_path / "b", "two")
    c, d = small(tmp_path / "c", "one"), small(tmp_path / "x" / "a", "one")
    assert labels([read_run(a), read_run(b)]) == ["one", "two"]
    assert labels([read_run(a), read_run(c)]) == ["a", "c"]
    assert labels([read_run(a), read_run(b), read_run(d)]) == ["one (1)", "two (2)", "one (3)"]


def test_page_of_several_runs_holds_each(run_dir: Path, tmp_path: Path) -> None:
    other = small(tmp_path / "other", rows=[{"step": 7, "reward/mean": 0.5}], config="run: {seed: 9}\n")
    out = write_report([run_dir, other], tmp_path / "both.html")
    assert "<title>demo · other · posttrain</title>" in out.read_text()
    data = page_data([read_run(run_dir), read_run(other)])
    assert [run["label"] for run in data["runs"]] == ["demo", "other"]
    assert data["runs"][1]["series"] == {"reward/mean": [0.5]} and data["runs"][1]["steps"] == [7]
    assert ["run.seed", ["1", "9"]] in [list(row) for row in data["differences"]]
    assert {sample["run"] for sample in data["samples"]} == {0}
    assert len(data["token_texts"]) == 2 and data["token_texts"][1] == {}


def test_notes_and_gaps_name_their_run(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = small(tmp_path / "other")
    (other / "samples").mkdir()
    (other / "samples" / "step_1.jsonl").write_text(
        'garbage\n{"sample_id": "a"}\n{"sample_id": "b"}\n{"sample_id": "c"}\n'
    )
    monkeypatch.setattr(embedded, "MAX_SAMPLES", 4)  # two for each run
    data = page_data([read_run(run_dir), read_run(other)])
    assert data["notes"] == ["other: samples/step_1.jsonl, line 1, is not a JSON object and was ignored."]
    assert data["left_out"][1] == "other: Of 1 step only the first samples are here."
    assert [sample["sample_id"] for sample in data["samples"] if sample["run"] == 1] == ["a", "b"]


def test_what_is_no_run_is_told_all_at_once(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    (evaluation / "results.json").write_text("{}")
    monkeypatch.setattr(html, "MAX_RUNS", 3)
    with pytest.raises(RequestError) as caught:
        read_runs([run_dir, run_dir, evaluation, tmp_path / "nowhere"])
    first, second, third, fourth = map(str, caught.value.problems)
    assert first == "4 runs do not fit on one page; name at most 3"
    assert second == f"{run_dir} is named 2 times; name it once"
    assert third.startswith(f"{evaluation} holds an evaluation, which does not go on a page with runs; name")
    assert fourth.startswith(f"{tmp_path / 'nowhere'} does not exist")


# ------------------------------------------------------------------------------------------------- tokens and phases


def token_file(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "samples" / "step_4.tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_tokens_go_to_the_sample_that_their_line_names(run_dir: Path) -> None:
    token_file(
        run_dir,
        [
            {"texts": {"7": "a", "8": "b", "9": "unused"}},
            {"line": 0, "token_ids": [7], "gap": float("nan"), "unknown": 1},
            {"line": 2, "token_ids": [7], "sampled": 1},
            {"line": 2, "token_ids": [8], "sampled": 1},  # a trajectory of two parts
            {"line": "2", "token_ids": [8]},
            {"line": 3, "token_ids": "none"},
        ],
    )
    texts, rows = token_rows(run_dir / "samples" / "step_4.jsonl")
    assert texts["7"] == "a" and {line: len(found) for line, found in rows.items()} == {0: 1, 2: 2}
    data = page_data([read_run(run_dir)])
    samples = [sample for sample in data["samples"] if (sample["kind"], sample["step"]) == ("training", 4)]
    assert samples[0]["tokens"] == [{"token_ids": [7], "gap": "nan"}]
    assert [part["token_ids"] for part in samples[2]["tokens"]] == [[7], [8]]
    assert "tokens" not in samples[1] and "tokens" not in samples[3]
    assert data["token_texts"][0]["8"] == "b"


def test_tokens_that_have_no_room_are_left_out_and_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = page_data([read_run(run_dir)])
    assert sum("tokens" in sample for sample in whole["samples"]) == 4 * 16
    monkeypatch.setattr(embedded, "MAX_TOKEN_BYTES", 2000)
    data = page_data([read_run(run_dir)])
    kept = [sample["tokens"] for sample in data["samples"] if "tokens" in sample]
    assert 0 < len(kept) < 16 and len(json.dumps(kept, separators=(",", ":"))) < 2100
    assert data["left_out"][0] == f"{4 * 16 - len(kept)} samples are here without their token values."
    assert next(s for s in data["samples"] if "tokens" in s)["step"] == 4  # the newest come first


def test_turns_are_cut_like_every_text(run_dir: Path) -> None:
    turns = [{"text": "x" * 30_000, "observation": "y"}, "no turn"]
    with (run_dir / "samples" / "step_4.jsonl").open("a") as file:
        file.write(json.dumps({"sample_id": "t", "turns": turns}) + "\n")
    (sample,) = [sample for sample in page_data([read_run(run_dir)])["samples"] if sample["sample_id"] == "t"]
    (turn,) = sample["turns"]
    assert turn["text"] == "x" * 20_000 + "… [10000 more characters in the run folder]" and turn["observation"] == "y"


def test_timeline_is_read_in_order_and_shown_from_its_start(run_dir: Path) -> None:
    lines = [
        {"step": 1, "phase": "update", "start_s": 1002.5, "end_s": 1004.0},
        {"step": 1, "phase": "rollout", "start_s": 1000.0, "end_s": 1002.5},
        {"step": 2, "phase": "rollout", "start_s": 1005.0, "end_s": 1003.0},  # ends before it begins
        {"step": "2", "phase": "rollout", "start_s": 1, "end_s": 2},
        {"step": 2, "phase": "rollout", "start_s": None, "end_s": 2},
    ]
    (run_dir / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "ph')
    assert [phase[1] for phase in read_timeline(run_dir)] == ["rollout", "update"]
    assert page_data([read_run(run_dir)])["runs"][0]["timeline"] == [
        (1, "rollout", 0.0, 2.5, ""),
        (1, "update", 2.5, 4.0, ""),
    ]
    assert read_timeline(run_dir, last=1) == [(1, "rollout", 1000.0, 1002.5, "")]  # the last that is written is a fact
    (run_dir / "timeline.jsonl").unlink()
    assert page_data([read_run(run_dir)])["runs"][0]["timeline"] == []
