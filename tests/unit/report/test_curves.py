"""The static picture of several runs."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from posttrain.errors import RequestError
from posttrain.report.curves import axis, smooth, tick_size, write_curves_svg

SVG = "{http://www.w3.org/2000/svg}"


def a_run(folder: Path, seed: int = 1, name: str = "demo", accuracy: tuple[float, float] = (0.2, 0.5)) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"run: {{name: {name}, seed: {seed}}}\n")
    (folder / "run.json").write_text(json.dumps({"name": name}))
    rows = [
        {"step": 0, "validation/sum/accuracy": accuracy[0]},
        {"step": 1, "reward/mean": 0.0},
        {"step": 2, "reward/mean": 1.0, "validation/sum/accuracy": accuracy[1]},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def texts(path: Path) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.parse(path).iter(f"{SVG}text")]


def test_curves_draw_a_panel_per_metric_and_a_line_per_run(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"r{seed}", seed=seed) for seed in (1, 2, 3)]
    out = write_curves_svg(runs, tmp_path / "docs" / "curves.svg")
    lines = list(ElementTree.parse(out).iter(f"{SVG}polyline"))
    assert len(lines) == 2 * 3
    assert [line.get("class") for line in lines] == ["line s0", "line s1", "line s2"] * 2
    # Accuracy 0.2 -> 0.5 on an axis from 0 to 0.5, 400 x 250 px: from (0, 250 - 2/5 * 250) to (400, 0).
    assert lines[0].get("points") == "0.0 150.0 400.0 0.0"
    # Reward at steps 1 and 2, on the same steps 0 to 2: from (200, 250) to (400, 0).
    assert lines[3].get("points") == "200.0 250.0 400.0 0.0"
    found = texts(out)
    for text in ["Held-out accuracy, sum", "Training reward (mean of a step)", "seed 1", "seed 2", "seed 3", "step"]:
        assert text in found


def test_curves_smooth_long_runs_over_the_raw_line(tmp_path: Path) -> None:
    run = a_run(tmp_path / "r")
    rows = [{"step": step, "reward/mean": step % 2} for step in range(1, 61)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = write_curves_svg([run], tmp_path / "c.svg", metrics=["reward/mean"])
    classes = [line.get("class") for line in ElementTree.parse(out).iter(f"{SVG}polyline")]
    assert classes == ["raw s0", "line s0"]


def test_curves_label_runs_by_name_when_seeds_do_not_differ(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "a", name="first"), a_run(tmp_path / "b", name="second")]
    assert {"first", "second"} <= set(texts(write_curves_svg(runs, tmp_path / "c.svg")))
    runs.append(a_run(tmp_path / "d", name="first"))
    assert {"first (1)", "second (2)", "first (3)"} <= set(texts(write_curves_svg(runs, tmp_path / "c.svg")))


def test_curves_survive_hostile_labels_and_break_long_legends(tmp_path: Path) -> None:
    run = a_run(tmp_path / "r")
    labels = ["<script>&\x1b\u202e\ud800", *("x" * 70 for _ in range(3))]
    out = write_curves_svg([run] * 4, tmp_path / "c.svg", labels=labels)
    found = texts(out)
    assert any(text.startswith("<script>&?") for text in found)
    assert found.count("x" * 57 + "...") == 3
    width = float(ElementTree.parse(out).getroot().get("width", ""))
    assert all(float(node.get("x", "0")) < width for node in ElementTree.parse(out).iter(f"{SVG}text"))


def test_curves_of_an_unknown_metric_name_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"reward/men: not logged by .*; known: reward/mean, validation/sum/accuracy"
    ):
        write_curves_svg([a_run(tmp_path / "r")], tmp_path / "c.svg", metrics=["reward/men"])


def test_curves_of_nothing_and_with_too_few_labels(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no run to draw"):
        write_curves_svg([], tmp_path / "c.svg")
    with pytest.raises(RequestError, match="1 labels for 2 runs"):
        write_curves_svg([a_run(tmp_path / "a"), a_run(tmp_path / "b")], tmp_path / "c.svg", labels=["one"])


def test_smooth_is_a_centred_mean() -> None:
    # 30 points: half width round(30 / 30) = 1, so each point is the mean of three, and the ends are the mean of two.
    points = [(step, 3.0 if step == 10 else 0.0) for step in range(30)]
    assert smooth(points)[8:13] == [(8, 0.0), (9, 1.0), (10, 1.0), (11, 1.0), (12, 0.0)]
    assert smooth([(0, 5.0), *points[1:]])[0] == (0, 2.5)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.25, 0.67], (0.0, 0.8, 0.2)),  # 0.25 < half of 0.67: from 0; 0.67 / 5 = 0.134 -> 0.2
        ([14.0, 20.6], (14.0, 22.0, 2.0)),  # 6.6 / 5 = 1.32 -> 2
        ([0.5, 0.5], (0.44, 0.56, 0.02)),  # one value: a tenth around it, 0.45 to 0.55; 0.1 / 5 = 0.02
        ([0.0, 0.0], (0.0, 1.0, 0.2)),
        ([-1.0, 1.0], (-1.0, 1.0, 0.5)),  # 2 / 5 = 0.4 -> 0.5
    ],
)
def test_axis_ends_on_ticks(values: list[float], expected: tuple[float, float, float]) -> None:
    assert axis(values) == pytest.approx(expected)


def test_tick_size_is_1_2_or_5() -> None:
    assert [tick_size(span, 5) for span in (1.0, 3.0, 7.0, 40.0)] == [0.2, 1.0, 2.0, 10.0]
