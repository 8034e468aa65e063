"""The viewer driven by its keys, at 80 columns and 24 lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from posttrain.cli.viewer.app import OneSample, Samples, Steps, Viewer
from posttrain.cli.viewer.sample_file import SampleFile
from posttrain.cli.viewer.sample_list import SampleList
from posttrain.errors import RequestError

HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e[bold red]no markup[/] [@click=app.quit]x[/] <script>"


def row(step: int, number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "sample_id": f"t:{number}/0",
        "prompt_id": f"t:{number}",
        "data_source": "sums",
        "prompt": f"{number}+1=",
        "response": f"it is {number + step}",
        "ground_truth": str(number + 1),
        "reward": float(number % 2),
        "reward_terms": {"exact": float(number % 2)},
        "reward_texts": {"exact/pred": "7"},
        "invalid": None,
        "advantage": 0.25,
        "stop_reason": "eos",
        "policy_version": step,
        "response_tokens": number,
    } | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps, the second with 40 samples, some hostile; validated before the first and after the second."""
    rows = {
        "samples/step_1": [row(1, number) for number in range(4)],
        "samples/step_2": [
            row(2, 0, response=HOSTILE),
            row(2, 1, response="x" * 100_000, turns=[{"text": "left\x1b", "observation": "a wall", "reward": -1.0}]),
            row(2, 2, reward=None, invalid={"reason": "timeout", "detail": "5 s \x1b[31m"}),
            *(row(2, number) for number in range(3, 40)),
        ],
        "validation/step_0": [row(0, number, advantage=None) for number in range(3)],
        "validation/step_2": [row(2, number, advantage=None) for number in range(2)],
    }
    for name, lines in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [
        {"step": 0, "validation/sums/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "gap/mean": 2.5e-6},
        {"step": 2, "reward/mean": None, "nonfinite": ["reward/mean"]},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (tmp_path / "config.yaml").write_text("model: {path: m}\n")
    (tmp_path / "run.json").write_text(json.dumps({"name": "try", "status": "done", "total_steps": 2}))
    return tmp_path


def drive(viewer: Viewer, play: Callable[[Pilot[None]], Awaitable[None]]) -> None:
    async def go() -> None:
        async with viewer.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            await play(pilot)

    asyncio.run(go())


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


def text(pilot: Pilot[None], name: str = "#text") -> str:
    return str(pilot.app.screen.query_one(name, Static).content)


@pytest.mark.slow
def test_steps_then_samples_then_one_sample_and_back(folder: Path) -> None:
    async def play(pilot: Pilot[None]) -> None:
        assert text(pilot, "#line") == "try · m · done, step 2 of 2"
        table = pilot.app.screen.query_one(DataTable)
        assert [table.get_row_at(place) for place in range(3)] == [
            ["0", "", "", "0.250", "v"],  # of the columns, those of metrics that were logged: reward and gap
            ["1", "0.5", "2.5e-06", "", "t"],
            ["2", "", "", "", "t v"],
        ]
        await press(pilot, "up", "enter")
        assert text(pilot, "#line") == "training, step 1 · 4 samples · as written"
        await press(pilot, "down", "enter")
        assert text(pilot, "#line") == "2 of 4 · t:1/0 · step 1"
        page = text(pilot)
        for part in ("reward 1\n  exact", "── prompt ──\n1+1=", "── response ──\nit is 2", "── ground_truth ──\n2"):
            assert part in page
        await press(pilot, "n", "n", "n")  # the last stays
        assert text(pilot, "#line").startswith("4 of 4")
        await press(pilot, "p", "escape")
        assert pilot.app.screen.query_one(SampleList).cursor == 2
        await press(pilot, "escape", "m")
        assert "step 1" in text(pilot) and "gap/mean     2.5e-06" in text(pilot)
        await press(pilot, "escape", "escape", "escape")
        assert isinstance(pilot.app.screen, Steps)

    drive(Viewer(folder), play)


def test_hostile_text_is_text(folder: Path) -> None:
    async def play(pilot: Pilot[None]) -> None:
        await press(pilot, "t")
        assert text(pilot, "#line") == "training, step 2 · 40 samples · as written"
        listed = pilot.app.screen.query_one(SampleList)
        lines = [listed.render_line(y).text for y in range(4)]
        assert all(len(line) <= 80 for line in lines)
        assert "␛]0;title␇" in lines[0] and "\x1b" not in "".join(lines)
        assert lines[2].split()[:2] == ["2", "invalid"]
        await press(pilot, "enter")
        assert "␛]0;title␇␛[2J<U+202E>[bold red]no markup[/] [@click=app.quit]x[/] <script>" in text(pilot)
        await press(pilot, "n")
        assert "x" * 2000 in text(pilot)
        assert "── turn 1 · reward -1 ──\nleft␛\n" in text(pilot) and "── answer to turn 1 ──\na wall\n" in text(pilot)
        await press(pilot, "n")
        assert "no valid reward: timeout\n5 s ␛[31m" in text(pilot)
        await press(pilot, "escape", "end")
        assert listed.cursor == 39 and listed.scroll_offset.y == 40 - listed.size.height

    drive(Viewer(folder), play)


@pytest.mark.slow
def test_of_ten_thousand_samples_those_on_the_screen_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = SampleFile._parse
    rows = (json.dumps(row(2, number, response="step by step " * 150)) + "\n" for number in range(10_000))  # 24 MB
    (folder / "samples" / "step_2.jsonl").write_text("".join(rows))
    parsed: list[int] = []
    monkeypatch.setattr(SampleFile, "_parse", lambda self, index: parsed.append(index) or parse(self, index))

    async def play(pilot: Pilot[None]) -> None:
        await press(pilot, "t")
        assert 0 < len(parsed) < 100
        assert text(pilot, "#line") == "training, step 2 · 10,000 samples · as written"

    drive(Viewer(folder), play)


@pytest.mark.slow
def test_filter_and_order(folder: Path) -> None:
    async def play(pilot: Pilot[None]) -> None:
        await press(pilot, "s", "S")
        assert text(pilot, "#line") == "training, step 1 · 4 samples · by reward, falling"
        assert list(pilot.app.screen.query_one(SampleList).numbers) == [3, 1, 2, 0]
        await press(pilot, "slash", *"tokens", "greater_than_sign", "1", "enter")
        assert text(pilot, "#line").startswith("training, step 1 · 2 of 4 samples") and "tokens>1" in text(
            pilot, "#line"
        )
        assert list(pilot.app.screen.query_one(SampleList).numbers) == [3, 2]
        await press(pilot, "slash", *"tokens", "equals_sign", "b", "enter")  # what is typed replaces what was there
        assert text(pilot, "#line") == "b is no number: tokens=b"
        await press(pilot, "slash", "escape")
        assert isinstance(pilot.app.screen, Samples)

    drive(Viewer(folder, 1), play)


@pytest.mark.slow
def test_what_changed_between_two_validations(folder: Path) -> None:
    async def play(pilot: Pilot[None]) -> None:
        await press(pilot, "d")
        page = text(pilot)
        assert "step 0 → 2   reward 1 → 1" not in page and "step 0 → 2   reward 0 → 0" in page
        assert "── response ──\nit is [-0-]{+2+}" in page
        await press(pilot, "escape", "escape", "up", "up", "v", "end", "enter", "d")
        assert text(pilot, "#line") == "3 of 3 · t:2/0 · step 0"  # sample 2 is not in the later one
        await press(pilot, "escape")
        assert text(pilot, "#line") == "step 2 has no sample t:2/0"

    drive(Viewer(folder, 2, "validation"), play)


def test_a_diff_needs_validations(folder: Path) -> None:
    async def play(pilot: Pilot[None]) -> None:
        await press(pilot, "d")
        assert "two validations" in text(pilot, "#line")
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, OneSample)

    drive(Viewer(folder, 1), play)


def test_steps_without_samples_and_a_run_that_goes_on(folder: Path) -> None:
    async def play(pilot: Pilot[None]) -> None:
        await press(pilot, "up", "v")
        assert text(pilot, "#line") == "no samples of a validation were written at step 1"
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "reward/mean": 1}\n')
        await press(pilot, "r")
        assert pilot.app.screen.query_one(DataTable).row_count == 4

    drive(Viewer(folder), play)


def test_a_folder_that_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"there is no metrics\.jsonl"):
        Viewer(tmp_path)
