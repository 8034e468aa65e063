"""Reading a run folder: whole, damaged, or not a run at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.errors import RequestError
from posttrain.report.read import json_rows, read_run


def test_read_run_gives_metrics_by_step_and_sample_files(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert (run.name, run.model, run.steps_done) == ("demo", "models/tiny-llama", 4)
    assert list(run.metrics) == [0, 1, 2, 3, 4]
    assert list(run.series("reward/mean")) == [1, 2, 3, 4]
    assert list(run.series("validation/chain_sum/accuracy")) == [0, 2, 4]
    assert run.data_sources() == ["chain_sum"]
    assert list(run.samples) == [1, 2, 3, 4]
    assert run.validation[4].name == "step_4.jsonl"
    assert run.notes == ()


def test_read_run_sorts_steps_as_numbers(run_dir: Path) -> None:
    (run_dir / "samples" / "step_10.jsonl").write_text("")
    (run_dir / "samples" / "step_10.jsonl.new").write_text("")
    assert list(read_run(run_dir).samples) == [1, 2, 3, 4, 10]


def test_read_run_passes_over_a_half_written_last_line(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"reward/mean": 0.5, "st')
    run = read_run(run_dir)
    assert run.steps_done == 4
    assert run.notes == ()  # a run that is going on looks like this: nothing to report


def test_read_run_says_which_line_is_broken(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "\x00garbage", *lines[2:]]) + "\n")
    run = read_run(run_dir)
    assert list(run.metrics) == [0, 2, 3, 4]
    assert run.notes == ("run/metrics.jsonl, line 2, is not a JSON object and was ignored.",)


def test_read_run_takes_null_and_nan_for_not_finite(run_dir: Path) -> None:
    line = '{"gap/max": NaN, "nonfinite": ["policy/loss"], "policy/loss": null, "reward/mean": 1, "step": 9}\n'
    (run_dir / "metrics.jsonl").write_text(line)
    assert read_run(run_dir).metrics == {9: {"gap/max": None, "policy/loss": None, "reward/mean": 1.0}}


def test_read_run_merges_lines_of_one_step(run_dir: Path) -> None:
    rows = [{"step": 1, "reward/mean": 0.5}, {"step": 1, "validation/sum/accuracy": 0.25}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(run_dir).metrics == {1: {"reward/mean": 0.5, "validation/sum/accuracy": 0.25}}


def test_read_run_notes_what_is_missing_or_broken(run_dir: Path) -> None:
    (run_dir / "config.yaml").unlink()
    (run_dir / "run.json").write_text("{")
    run = read_run(run_dir)
    assert run.notes == ("config.yaml is missing.", "run.json could not be read.")
    assert (run.name, run.model) == ("run", "")  # the folder's name


@pytest.mark.parametrize("text", ["model: a string\n", "model:\n", "- a\n- b\n", "a: [\n", "model: {path: null}\n"])
def test_read_run_survives_any_config(run_dir: Path, text: str) -> None:
    (run_dir / "config.yaml").write_text(text)
    assert read_run(run_dir).model in ("", "a string")
    assert read_run(run_dir).config_text == text


def test_read_run_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nowhere does not exist; name the folder that a run was written to"):
        read_run(tmp_path / "nowhere")


def test_read_run_of_a_file(run_dir: Path) -> None:
    with pytest.raises(RequestError, match="is a file, not a run folder"):
        read_run(run_dir / "metrics.jsonl")


def test_read_run_of_the_folder_above_offers_the_run(run_dir: Path) -> None:
    with pytest.raises(RequestError, match=r"no metrics.jsonl in it, at .*; did you mean .*run\?") as caught:
        read_run(run_dir.parent)
    assert caught.value.exit_code == 2


def test_json_rows_only_splits_at_newlines(tmp_path: Path) -> None:
    path = tmp_path / "step_1.jsonl"
    path.write_text('{"response": "a\u2028b\u0085c"}\n{"response": "d"}\n[1]\n', encoding="utf-8")
    notes: list[str] = []
    assert [row["response"] for row in json_rows(path, notes)] == ["a\u2028b\u0085c", "d"]
    assert len(notes) == 1 and "line 3" in notes[0]


def test_one_answer_to_how_good_a_run_is(tmp_path: Path) -> None:
    """80 questions at 0.7 and 40 at 0.95 are 0.783 per question; the mean of the two tasks, 0.825, is shown nowhere."""
    from posttrain.backends.tracking.console import accuracies
    from posttrain.cli.viewer.app import _cells
    from posttrain.report.contents import page_data

    overall = (80 * 0.7 + 40 * 0.95) / 120
    metrics = {"validation/sums/accuracy": 0.7, "validation/products/accuracy": 0.95}
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1} | metrics)
        + "\n"
        + json.dumps({"step": 2, "validation/accuracy": overall} | metrics)
        + "\n"
    )
    run = read_run(tmp_path)
    assert run.accuracy(1) is None  # an earlier version's run does not say it
    assert run.accuracy(2) == overall
    assert _cells(run, 2, ())[1] == "0.783"
    assert accuracies(run.metrics[2]) == {"sums": 0.7, "products": 0.95, "all questions": overall}
    (first, *_) = page_data([run])["runs"][0]["headline"]
    assert first["source"] == "all questions" and [point["accuracy"] for point in first["points"]] == [overall]


def test_the_only_data_source_is_all_questions(tmp_path: Path) -> None:
    from posttrain.backends.tracking.console import accuracies

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "validation/sums/accuracy": 0.7}\n')
    assert read_run(tmp_path).accuracy(1) == 0.7
    assert accuracies({"validation/sums/accuracy": 0.7, "validation/accuracy": 0.7}) == {"sums": 0.7}
