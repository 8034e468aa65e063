"""The report in a real browser: drawn, clicked through, harmless, and without a network.

Needs playwright (the extra ``browser``) and a Chromium: Debian's package ``chromium``, or ``playwright install chromium``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from posttrain.report.html import write_report
from posttrain.report.live import serving

from .conftest import made_up_run, write_rows

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'posttrain[browser]'"
)
pytestmark = pytest.mark.slow

HOSTILE = [
    "<script>document.title = 'taken'</script>",
    "</script><script>document.title = 'taken'</script><!--",
    "<img src=x onerror=\"document.title = 'taken'\"><svg onload=\"document.title = 'taken'\">",
    "<iframe src='http://127.0.0.1:9/'></iframe><link rel=stylesheet href='http://127.0.0.1:9/a.css'>",
    "javascript:document.title='taken'",
    "\x1b[31mred\x1b]0;taken\x07\x00",
    "\u202egnp.exe\u202c\u2066\u2069\u200b\ufeff",
    "\ud800 a lone surrogate",
    "x" * 100_000,
    "{{data}} ${document.title = 'taken'}",
]
PHONE, DESKTOP = 390, 1280


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all tests of this file."""
    with sync_api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if path is None and not own.exists():
            pytest.skip("there is no Chromium: apt-get install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"]
        )  # root has no sandbox in a box
        yield browser
        browser.close()


class Visit:
    """A page that is open, and what it did: the addresses it asked for, its errors and its dialogs."""

    def __init__(self, browser: Any, address: str, width: int, offline: bool):
        self._context = browser.new_context(viewport={"width": width, "height": 900}, offline=offline)
        self.page = self._context.new_page()
        self.page.set_default_timeout(10_000)
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("dialog", lambda dialog: (self.wrong.append("a dialog"), dialog.dismiss()))
        self.page.on("popup", lambda _: self.wrong.append("a window"))
        self.page.goto(address)

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.page.locator(selector).all_inner_texts()
        return found

    def count(self, selector: str) -> int:
        number: int = self.page.locator(selector).count()
        return number

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        wider: int = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return wider

    def close(self) -> None:
        self._context.close()


Open = Callable[..., Visit]


@pytest.fixture
def visit(chromium: Any) -> Iterator[Open]:
    """Opens a report file, offline. At the end nothing must have gone wrong, and nothing but the file been asked for."""
    visits: list[tuple[Visit, str]] = []

    def start(path: Path, width: int = DESKTOP) -> Visit:
        visits.append((Visit(chromium, path.as_uri(), width, offline=True), path.as_uri()))
        return visits[-1][0]

    yield start
    for one, address in visits:
        one.close()
        assert one.wrong == [] and one.asked == [address]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps. Do not write into it."""
    return made_up_run(tmp_path_factory.mktemp("demo") / "run", steps=20, samples=16, every=10)


def rows_of(run: Path, kind: str, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / kind / f"step_{step}.jsonl").read_text().splitlines()]


def choose(one: Visit, **values: str) -> list[str]:
    """Set controls by their id (- is _ here); the responses that are listed then."""
    for name, value in values.items():
        control = one.page.locator(f"#{name.replace('_', '-')}")
        control.select_option(value) if control.evaluate("node => node.tagName") == "SELECT" else control.fill(value)
    while one.page.locator("#show-more").is_visible():
        one.page.click("#show-more")
    return one.texts("#rows tr.row td:nth-child(3)")


# ------------------------------------------------------------------------------------------------------ charts, times


def test_an_asynchronous_run_shows_who_waited_and_the_versions_of_a_response(visit: Open, tmp_path: Path) -> None:
    """The sampler works while its rollout phases are under way; the trainer waits in those of the loop's own lane."""
    run = made_up_run(tmp_path / "run", steps=3, samples=8, every=3)
    with (run / "config.yaml").open("a") as config:
        config.write("asynchronous: {mode: one_step}\n")
    stale = [
        {"step": step, "async/staleness_steps_mean": 1.0, "async/staleness_steps_max": 1.0,
         "time/trainer_waited_share": 0.25, "time/samplers_waited_share": 0.5}
        for step in (1, 2, 3)
    ]  # fmt: skip
    (run / "metrics.jsonl").open("a").writelines(json.dumps(each) + "\n" for each in stale)
    # 0 to 4 the loop samples; 4 to 8 it trains while a sampler works from 5 to 9 in its own lane; 8 to 9 it waits.
    spans = [
        ("rollout", 0, 4, None),
        ("update", 4, 8, None),
        ("rollout", 5, 9, "sampler"),
        ("sampler_wait", 8, 9, None),
    ]
    phases = [
        {"step": 1, "phase": name, "start_s": start, "end_s": end, "lane": lane} for name, start, end, lane in spans
    ]
    write_rows(run / "timeline.jsonl", phases)
    samples, tokens = run / "samples/step_3.jsonl", run / "samples/step_3.tokens.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    write_rows(samples, [{**rows[0], "version_spans": [[0, 2], [3, 3]]}, *rows[1:]])
    lines = [json.loads(line) for line in tokens.read_text().splitlines()]
    versions = [2, 2, 2, 3, 3][: len(lines[1]["token_ids"])]
    write_rows(tokens, [lines[0], {**lines[1], "versions": versions}, *lines[2:]])
    one = visit(write_report([run]))
    assert {"Staleness steps", "Who waited share of the step"} <= set(one.texts("#charts .title"))
    lanes = [text for text in one.page.locator("#gantt svg text").all_text_contents() if "waits" in text]
    assert lanes == ["trainer waits", "sampler waits"]
    widths = [float(bar.get_attribute("width")) for bar in one.page.locator("#gantt rect.wait").all()]
    second = one.page.locator("#gantt rect").first.bounding_box()["width"] / 4  # the first bar is the rollout of 4 s
    assert [round(width / second) for width in widths] == [4, 1, 1]  # the trainer 0-4 and 8-9, the sampler 4-5
    choose(one, pick="training 3", order="new")
    one.page.locator("#rows tr.row").first.click()
    assert "2 from token 0, 3 from token 3" in " ".join(one.texts("#rows .detail dd"))
    one.page.locator("select.shade").first.select_option("versions")
    shown = one.page.locator("pre.tokens").first
    assert (shown.locator(".v1").count(), shown.locator(".v2").count()) == (versions.count(2), versions.count(3))
    assert one.texts(".hint .token.key") == ["2", "3"]


def test_charts_times_and_phases_are_drawn(visit: Open, demo: Path, tmp_path: Path) -> None:
    one = visit(write_report([demo], tmp_path / "r.html"))
    titles = one.texts("#charts .title")
    assert titles[:3] == ["Reward mean of a step", "Held-out accuracy share right", "Response length tokens"]
    assert len(titles) == 10 == one.count("#charts figure > svg")
    for path in one.page.locator("#charts path.line").all():
        assert path.get_attribute("d").count("L") >= 2 and "NaN" not in path.get_attribute("d")
    assert one.count("#charts figure:nth-child(2) circle") == 3  # validated at 0, 10, 20
    one.page.locator("#charts figure").first.locator("svg").hover(position={"x": 200, "y": 60})
    values = [text for text in one.texts("#charts .value") if text]
    assert len(values) == 10 and all("at step" in text for text in values)
    assert one.texts("#time-table tbody tr td:first-child")[:3] == ["rollout", "reward", "update"]
    assert one.page.input_value("#gantt-steps") == "3"  # steps 15 to 19; 20 stands alone
    assert one.count("#gantt rect") == 5 * 4  # rollout, reward, update, weight sync
    one.page.select_option("#gantt-steps", "2")
    assert one.count("#gantt rect") == 5 * 4 + 1  # step 10 was validated
    one.page.click("#more summary")
    one.page.locator("#more-charts .title").first.wait_for()  # they are drawn when the browser says that it is open
    assert "policy/lr" in " ".join(one.texts("#more-charts .title"))


def test_charts_name_their_axis_and_fold_away_nothing_but_zeros(visit: Open, tmp_path: Path) -> None:
    """Two charts of constant zeros stood before the curves that say something; no axis had a word."""
    rows = [{"step": i, "reward/mean": i / 10, "policy/clip_fraction": 0.0, "policy/kl_old": 0.0} for i in range(1, 5)]
    accuracies = {"validation/accuracy": 0.75, "validation/sums/accuracy": 0.7, "validation/products/accuracy": 0.95}
    write_rows(tmp_path / "metrics.jsonl", [*rows, {"step": 5, "reward/mean": 0.5, **accuracies}])
    one = visit(write_report([tmp_path]))
    assert one.texts("#charts .title") == ["Reward mean of a step", "Held-out accuracy share right"]
    assert one.texts("#charts .legend > span") == ["all questions 0.75", "products 0.95", "sums 0.7"]
    assert one.page.locator("#charts svg text.x-word").all_text_contents() == ["step", "step"]
    assert one.texts("#headline h3")[0] == "Held-out accuracy · all questions"
    one.page.click("#more summary")
    one.page.locator("#more-charts .title").first.wait_for()  # they are drawn when the browser says that it is open
    assert {"policy/clip_fraction", "policy/kl_old"} <= set(one.texts("#more-charts .title"))


def test_ticks_can_be_told_apart(visit: Open, tmp_path: Path) -> None:
    """From low to high, with the tick that the axis takes: 4.952 to 4.961 in steps of 0.002, and so on."""
    expected = {
        "a": ((4.952, 4.961), ["4.952", "4.954", "4.956", "4.958", "4.96", "4.962"]),
        "b": ((-0.00013, 0.0), ["-1.5e-4", "-1e-4", "-5e-5", "0"]),
        "c": ((3.61e-7, 3.75e-7), ["3.6e-7", "3.65e-7", "3.7e-7", "3.75e-7"]),
        "d": ((1_200_000, 4_000_000), ["0", "1e+6", "2e+6", "3e+6", "4e+6"]),
        "e": ((3100, 4800), ["3,000", "3,500", "4,000", "4,500", "5,000"]),
    }
    write_rows(
        tmp_path / "metrics.jsonl", [{"step": i} | {k: ends[i] for k, (ends, _) in expected.items()} for i in (0, 1)]
    )
    one = visit(write_report([tmp_path]))
    one.page.click("#more summary")
    for number, (_, labels) in enumerate(expected.values()):
        figure = one.page.locator("#more-charts figure").nth(number)
        assert figure.locator("svg text[text-anchor=end]").all_text_contents() == labels


def test_fine_tuning_shows_its_losses(visit: Open, tmp_path: Path) -> None:
    rows = [
        {"step": step, "policy/loss": 2 - step / 10, "time/update_s": 1.0, "time/step_s": 1.5} for step in range(1, 5)
    ]
    rows[1] |= {"validation/loss": 1.9, "time/validation_loss_s": 0.4}
    write_rows(tmp_path / "metrics.jsonl", rows)
    one = visit(write_report([tmp_path]))
    assert one.texts("#charts .title") == ["Loss nats per token"]
    assert one.texts("#charts .legend > span") == ["training 1.6", "held-out 1.9"]
    assert one.texts("#time-table tbody td:first-child") == ["update", "validation loss", "other", "all"]
    assert not one.page.locator("#samples").is_visible()


def test_a_run_without_a_timeline_has_its_phases_laid_end_to_end(visit: Open, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=2, samples=8, every=2)
    (run / "timeline.jsonl").unlink()
    one = visit(write_report([run]))
    assert one.texts("#gantt .unit") == ["laid end to end: this run has no timeline.jsonl"]
    # Step 0: validation and what else its time was; 1 and 2: four phases and other; 2 also validation.
    assert one.count("#gantt rect") >= 1 + 4 + 5


# ---------------------------------------------------------------------------------------------------------- samples


def test_filters_and_orders_of_samples(visit: Open, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=2, samples=24, every=2)
    rows = rows_of(run, "samples", 2)
    for number, row in enumerate(rows):
        row |= {
            "reward": [None, 0.0, 0.5, 1.0][number % 4],
            "response": f"answer {number}",
            "response_tokens": 100 - number,
        }
        row |= {"invalid": None if number % 4 else {"reason": "timeout", "detail": "late"}, "advantage": float(number)}
        row |= {"stop_reason": "length" if number < 3 else "eos", "data_source": "words" if number > 20 else "sums"}
    write_rows(run / "samples" / "step_2.jsonl", rows)
    one = visit(write_report([run]))

    def answers(wanted: Callable[[int], bool]) -> list[str]:
        return [f"answer {number}" for number in range(24) if wanted(number)]

    assert one.page.input_value("#pick") == "validation 2"
    assert choose(one, pick="training 2") == answers(lambda _: True)
    assert one.texts("#count") == ["24 samples, 6 right, mean reward 0.5"]
    assert choose(one, outcome="right") == answers(lambda n: n % 4 == 3)
    assert choose(one, outcome="invalid") == answers(lambda n: n % 4 == 0)
    assert choose(one, outcome="all", at_least="0.5") == answers(lambda n: n % 4 >= 2)
    assert choose(one, at_most="0.5") == answers(lambda n: n % 4 == 2)
    assert choose(one, at_least="no number") == answers(lambda n: n % 4 in (1, 2))
    assert choose(one, at_least="", at_most="", ended="length") == answers(lambda n: n < 3)
    assert choose(one, ended="", task="words") == answers(lambda n: n > 20)
    assert choose(one, task="", find="ANSWER 1") == answers(lambda n: n == 1 or 10 <= n < 20)
    assert choose(one, find="", order="short") == answers(lambda _: True)[::-1]
    assert choose(one, order="advantage") == answers(lambda _: True)[::-1]
    assert choose(one, order="high")[:6] == answers(lambda n: n % 4 == 3)
    assert choose(one, order="low")[:6] == answers(lambda n: n % 4 == 0)  # without a reward
    assert choose(one, find="nowhere to be found") == [] and one.texts("#rows") == ["No sample fits."]


def test_samples_of_a_prompt_are_found_and_opened_by_key(visit: Open, demo: Path, tmp_path: Path) -> None:
    one = visit(write_report([demo], tmp_path / "r.html"))
    choose(one, pick="training 20")
    one.page.locator("tr.row").nth(3).focus()
    one.page.keyboard.press("Enter")
    assert one.texts(".detail h4")[:3] == ["Prompt", "Response", "Expected"]
    assert one.page.locator("tr.row").nth(3).get_attribute("aria-expanded") == "true"
    one.page.click("text=all samples of this prompt on this page")
    assert one.page.input_value("#find") == "train.parquet:0" and one.page.input_value("#pick") == ""
    listed = choose(one)
    steps = [("samples", step) for step in range(1, 21)] + [("validation", step) for step in (0, 10, 20)]
    every = [row for kind, step in steps for row in rows_of(demo, kind, step)]
    assert len(listed) == sum("train.parquet:0" in row["prompt_id"] for row in every)
    one.page.locator("tr.row").first.click()
    one.page.locator("tr.row").first.click()
    assert one.page.locator("tr.row").first.get_attribute("aria-expanded") == "false"


def test_tokens_are_coloured_and_read(visit: Open, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=1, samples=8, every=1)
    part = {
        "line": 0, "token_ids": [7, 8, 9, 7], "sampled": [1, 0, 1, 1], "in_loss": [1, 0, 1, 0],
        "rollout_logprobs": [-0.5, 0, -5, -1],
        "gap": [0.0, 0.0, 0.01, None], "advantages": [-1.0, 0.0, 0.5, 0.5], "ref_gap": 0.25,
    }  # fmt: skip
    write_rows(run / "samples" / "step_1.tokens.jsonl", [{"texts": {"7": " the", "8": "\n<b>", "9": "\u202e"}}, part])
    one = visit(write_report([run]))
    choose(one, pick="training 1")
    one.page.locator("tr.row").first.click()
    tokens = one.page.locator(".tokens .token")
    assert [token.inner_text() for token in tokens.all()] == [" the", "\n<b>", "\\u202e", " the"]
    assert [token.get_attribute("class") for token in tokens.all()] == [
        "token",
        "token given",
        "token",
        "token outside lost",
    ]

    def colours(column: str) -> list[str]:
        one.page.select_option(".shade", column)
        found: list[str] = [token.evaluate("node => node.style.backgroundColor") for token in tokens.all()]
        return found

    # |gap| 0.01 is half-way from 1e-4 to 1 on a logarithmic scale: 0.75 * 0.5, red, since the sampler was surer.
    assert colours("gap") == ["", "", "rgba(179, 66, 61, 0.38)", ""]
    assert colours("advantages") == [
        "rgba(179, 66, 61, 0.75)", "", "rgba(31, 140, 80, 0.38)", "rgba(31, 140, 80, 0.38)"
    ]  # fmt: skip
    assert colours("rollout_logprobs")[2] == "rgba(208, 122, 29, 0.75)"  # -5 and less is the strongest
    assert colours("in_loss") == [""] * 4
    assert one.page.locator(".shade option").all_inner_texts() == [
        "gap, rollout − trainer", "log-prob", "advantage", "mask", "trainer − reference"
    ]  # fmt: skip
    tokens.nth(2).hover()
    reading = one.texts(".reading")[0]
    assert (
        reading
        == "token 2, id 9: log-prob -5 · gap 0.01 · trainer − reference 0.25 · advantage 0.5 · in loss 1 · sampled 1"
    )
    choose(one, order="gap")
    assert (
        one.page.locator("tr.row").first.locator("td").nth(2).inner_text() == rows_of(run, "samples", 1)[0]["response"]
    )


def test_tokens_of_a_validation_have_log_probs_and_no_mask(visit: Open, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=1, samples=8, every=1)
    part = {"line": 0, "token_ids": [7, 8], "sampled": 1, "rollout_logprobs": [-0.5, -5], "gap": [0.01, 0.0]}
    write_rows(run / "validation" / "step_1.tokens.jsonl", [{"texts": {"7": " the", "8": " end"}}, part])
    one = visit(write_report([run]))
    choose(one, pick="validation 1")
    one.page.locator("tr.row").first.click()
    tokens = one.page.locator(".tokens .token")
    assert [token.get_attribute("class") for token in tokens.all()] == ["token", "token"]
    assert one.page.locator(".shade option").all_inner_texts() == ["gap, rollout − trainer", "log-prob"]
    tokens.nth(0).hover()
    assert one.texts(".reading") == ["token 0, id 7: log-prob -0.5 · gap 0.01 · sampled 1"]


def test_long_responses_show_their_tokens_in_parts(visit: Open, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=1, samples=8, every=1)
    part = {"line": 0, "token_ids": [7] * 4500, "sampled": 1, "in_loss": 1, "rollout_logprobs": -1, "advantages": 0}
    write_rows(run / "samples" / "step_1.tokens.jsonl", [{"texts": {"7": "a"}}, part])
    one = visit(write_report([run]))
    choose(one, pick="training 1")
    one.page.locator("tr.row").first.click()
    assert one.count(".token") == 2000
    one.page.click("text=Show more tokens (2500 left)")
    one.page.click("text=Show more tokens (500 left)")
    assert one.count(".token") == 4500 and one.count("text=Show more tokens >> visible=true") == 0


def test_turns_are_shown_one_by_one(visit: Open, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=1, samples=8, every=1)
    rows = rows_of(run, "samples", 1)
    rows[0]["turns"] = [
        {
            "start": 0,
            "end": 5,
            "text": "<search>x</search>",
            "observation": "<b>found</b>",
            "reward": 0.25,
            "stop_reason": "eos",
        },
        {"start": 9, "end": 12, "text": "done", "observation": "", "reward": None, "stop_reason": "length"},
    ]
    rows[0]["environment"] = {"reward": 0.25, "stop": "solved", "metrics": {"searches": 1.0}}
    rows[1]["turns"] = [3, "no turn", {"text": None}]
    write_rows(run / "samples" / "step_1.jsonl", rows)
    one = visit(write_report([run]))
    choose(one, pick="training 1")
    one.page.locator("tr.row").nth(1).click()
    assert one.texts(".turn h4") == ["Turn 1"]
    one.page.locator("tr.row").nth(1).click()
    one.page.locator("tr.row").first.click()
    assert one.texts(".turn h4") == ["Turn 1", "answered by the environment", "Turn 2"]
    assert one.texts(".turn pre") == ["<search>x</search>", "<b>found</b>", "done"]
    assert "reward\n0.25" in one.texts(".turn dl")[0] and "solved" in one.texts(".detail > dl")[0]


def test_two_validations_of_a_prompt_are_laid_over_each_other(visit: Open, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=2, samples=8, every=2)
    words = {0: "I add two and two and get five .", 2: "I add two and three and so get five !\nDone."}
    for step, response in words.items():
        rows = rows_of(run, "validation", step)
        rows[0]["response"] = response
        write_rows(run / "validation" / f"step_{step}.jsonl", rows)
    one = visit(write_report([run]))
    one.page.locator("tr.row").first.click()
    options = one.page.locator(".other option").all_inner_texts()
    assert len(options) == 2 and options[1].startswith("step 0, reward ")
    one.page.select_option(".other", index=1)
    assert one.texts(".difference del") == ["two", "."]
    assert [text.strip() for text in one.texts(".difference ins")] == ["three", "so", "!\nDone."]
    kept = "node => [...node.childNodes].filter(n => n.nodeName !== '%s').map(n => n.textContent).join('')"
    box = one.page.locator(".difference")
    assert (box.evaluate(kept % "INS"), box.evaluate(kept % "DEL")) == (words[0], words[2])


def test_long_texts_are_compared_too(visit: Open, tmp_path: Path) -> None:
    """Too many words to compare one by one: lines are. Too many lines: what lies between the common beginning and end."""
    run = made_up_run(tmp_path / "run", steps=2, samples=8, every=2)
    for step in (0, 2):
        rows = rows_of(run, "validation", step)
        # 60 lines of 40 words differ between lines that do not: 4800 words in all, more than 2000 x 2000.
        rows[0]["response"] = "".join(f"{f'{step}.{n} ' * 40}\nline {n}\n" for n in range(60))
        rows[1]["response"] = "start\n" + "".join(f"{n}\n" for n in range(step, 6000 + step, 2 + step)) + "end"
        write_rows(run / "validation" / f"step_{step}.jsonl", rows)
    one = visit(write_report([run]))
    for number, gone in ((0, 60), (1, 1)):
        one.page.locator("tr.row").nth(number).click()
        one.page.locator(".other").first.select_option(index=1)
        assert one.count(".difference del") == one.count(".difference ins") == gone
        one.page.locator("tr.row").nth(number).click()


# ------------------------------------------------------------------------------------------------ whatever a model wrote


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_hostile_completions_are_harmless_and_readable(visit: Open, tmp_path: Path, width: int) -> None:
    run = made_up_run(tmp_path / "run", steps=1, samples=8, every=1)
    rows = rows_of(run, "samples", 1)[:1] * len(HOSTILE)
    fields = ("prompt", "response", "ground_truth", "sample_id", "prompt_id", "data_source", "stop_reason")
    rows = [row | dict.fromkeys(fields, text) for row, text in zip(rows, HOSTILE, strict=True)]
    for row, text in zip(rows, HOSTILE, strict=True):
        short = text[:200]
        row |= {
            "reward_terms": {short: 1.0},
            "reward_texts": {short: short},
            "turns": [{"text": text, "observation": text}],
        }
        row |= {"invalid": {"reason": text, "detail": text}, "environment": {"stop": text, "metrics": {short: short}}}
    write_rows(run / "samples" / "step_1.jsonl", rows)
    tokens = [
        {"line": n, "token_ids": [n], "sampled": 1, "in_loss": 1, "gap": HOSTILE[n][:50]} for n in range(len(HOSTILE))
    ]
    write_rows(
        run / "samples" / "step_1.tokens.jsonl", [{"texts": {str(n): text for n, text in enumerate(HOSTILE)}}, *tokens]
    )
    (run / "config.yaml").write_text("a: |\n  <script>document.title = 'taken'</script>\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": 1, text[:300]: 1.0}) + "\n" for text in HOSTILE)

    one = visit(write_report([run]), width=width)
    title = one.page.title()
    scripts = one.count("script")
    assert scripts == 2
    assert len(choose(one, pick="training 1")) == len(HOSTILE)
    for row in one.page.locator("tr.row").all():
        row.click()
    one.page.click("#more summary")
    one.page.wait_for_timeout(200)  # for what an event handler or an image would do
    assert one.page.title() == title and one.count("script") == scripts
    assert one.count("img") == one.count("iframe") == one.count("link") == one.count("a") == 0
    shown = one.texts(".turn pre.text:not(.given)")
    assert shown[0] == HOSTILE[0] and shown[5] == "\\x1b[31mred\\x1b]0;taken\\x07\\x00"
    assert shown[6] == "\\u202egnp.exe\\u202c\\u2066\\u2069\\u200b\\ufeff" and shown[7] == "\\ud800 a lone surrogate"
    assert shown[8] == "x" * 20_000 + "… [80000 more characters in the run folder]"
    assert one.overflow() <= 0
    assert one.texts("#find") == [""] and choose(one, find="<script>") != []


def test_values_of_any_kind_break_nothing(visit: Open, tmp_path: Path) -> None:
    """Every field of a sample, of its turns and of its tokens, with values of every kind, as a damaged or foreign file has."""
    run = made_up_run(tmp_path / "run", steps=1, samples=8, every=1)
    (plain, *_) = rows_of(run, "samples", 1)
    plain |= {
        "turns": [{"start": 0, "end": 1, "text": "t", "observation": "o", "reward": 0.5}],
        "environment": {"metrics": {}},
    }
    kinds: list[Any] = [None, True, -3, 1.5, float("inf"), "text", [], [1, "a", None], {}, {"a": {"b": []}}]
    columns = [
        "sampled",
        "in_loss",
        "rollout_logprobs",
        "gap",
        "ref_gap",
        "advantages",
        "values",
        "returns",
        "token_rewards",
    ]
    rows, tokens = [], [{"texts": {"1": "a"}}]
    for name in plain:
        for kind in kinds:
            rows.append(plain | {name: kind})
    for name in plain["turns"][0]:
        rows += [plain | {"turns": [plain["turns"][0] | {name: kind}]} for kind in kinds]
    for line, kind in enumerate(kinds):
        tokens.append({"line": line, "token_ids": [1, kind, 1]} | dict.fromkeys(columns, kind))
    write_rows(run / "samples" / "step_1.jsonl", rows)
    write_rows(run / "samples" / "step_1.tokens.jsonl", tokens)
    info = json.loads((run / "run.json").read_text())
    for number, name in enumerate(info):
        info[name] = kinds[-1 - number]
    (run / "run.json").write_text(json.dumps(info))
    one = visit(write_report([run]))
    assert len(choose(one, pick="training 1")) == len(rows)
    one.page.evaluate("document.querySelectorAll('tr.row').forEach(row => row.click())")
    assert one.count(".detail") == len(rows) and one.count(".tokens") == len(kinds)
    tried = one.page.evaluate(
        """() => [...document.querySelectorAll('.shade, .other, #order')].flatMap(select => [...select.options].map(option => {
            select.value = option.value;
            select.dispatchEvent(new Event('change'));
        })).length"""
    )
    assert tried > 100  # an error in any of them is seen when the visit ends


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_nothing_is_wider_than_the_window(visit: Open, demo: Path, tmp_path: Path, width: int) -> None:
    second = made_up_run(tmp_path / "second", steps=6, samples=8, seed=2, name="second")
    for folders in ([demo], [demo, second]):
        one = visit(write_report(folders, tmp_path / f"{len(folders)}.html"), width=width)
        choose(one, pick="training 6")
        one.page.locator("tr.row").first.click()
        one.page.click("#more summary")
        assert one.overflow() <= 0
        drawn = one.page.locator("#charts svg").first.bounding_box()
        assert drawn["width"] > 250 and drawn["x"] + drawn["width"] <= width


# ------------------------------------------------------------------------------------------------------- several runs


def test_runs_are_compared(visit: Open, demo: Path, tmp_path: Path) -> None:
    other = made_up_run(tmp_path / "other", steps=10, samples=8, seed=2, name="other", every=5)
    one = visit(write_report([demo, other], tmp_path / "both.html"))
    assert one.texts("h1") == ["demo · other"]
    assert one.texts("#differences tbody tr") == ['run.name\t"demo"\t"other"', "run.seed\t1\t2"]
    reward = one.page.locator("#charts figure").first
    assert reward.locator("path.line").count() == 2
    assert [text.split()[0] for text in reward.locator(".legend > span").all_inner_texts()] == ["demo", "other"]
    assert "Speed: rollout tokens/s" in one.texts("#charts .title")  # a chart for each metric
    accuracy = one.page.locator("#results tbody tr").first.locator("td").all_inner_texts()
    assert accuracy[0] == "validation/chain_sum/accuracy" and " at 20\n" in accuracy[1] and " at 10\n" in accuracy[2]
    assert one.count("#results tbody tr:first-child .best.top") >= 1
    assert choose(one, pick="", of_run="1", find="")  # samples of the second run only
    assert one.page.locator("tr.row td:last-child i.f1").count() == 0
    choose(one, pick="validation 10", of_run="")
    one.page.locator("tr.row").first.click()
    others = one.page.locator(".other option").all_inner_texts()
    assert any(text.startswith("other, step 10, reward ") for text in others)  # the same prompt, of the other run
    assert any(text.startswith("demo, step 20, reward ") for text in others)
    one.page.select_option("#time-run", "1")
    assert (
        "8–10" not in one.texts("#gantt-steps option")
        and one.page.locator("#gantt-steps option").all_inner_texts()[-1] == "10"
    )
    one.page.select_option("#config-run", "1")
    assert "seed: 2" in one.texts("#config-text")[0]


def test_equal_configurations_say_so(visit: Open, tmp_path: Path) -> None:
    runs = [made_up_run(tmp_path / name, steps=1, samples=8) for name in ("a", "b")]
    assert visit(write_report(runs)).texts("#differences") == ["The configurations are the same."]


# --------------------------------------------------------------------------------------------------------------- live


def test_live_page_follows_the_run(chromium: Any, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=3, samples=8, every=1)
    with serving([run]) as address:
        one = Visit(chromium, address, DESKTOP, offline=False)
        assert one.texts(".facts dd")[1] == "3 of 3"
        choose(one, pick="training 3", find="State")
        one.page.locator("tr.row").nth(2).click()
        one.page.select_option(".shade", "advantages")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "reward/mean": 0.123}\n')
        write_rows(run / "samples" / "step_4.jsonl", rows_of(run, "samples", 3))
        sync_api.expect(one.page.locator(".facts dd").nth(1)).to_have_text("4 of 3", timeout=60_000)
        assert one.texts("#charts figure:first-child .value") == ["0.123"]
        assert one.page.input_value("#pick") == "training 3" and one.page.input_value("#find") == "State"
        assert one.page.locator("tr.row").nth(2).get_attribute("aria-expanded") == "true"  # still open
        assert one.page.input_value(".shade") == "advantages"  # and as it was
        assert "training step 4 (8)" in one.page.locator("#pick option").all_inner_texts()
        assert one.texts("#live")[0].startswith("live, looked at ")
        assert {url.split("?")[0] for url in one.asked} == {address, f"{address}data.json"}
        assert one.wrong == []
    lost = "posttrain report --live no longer answers; the page shows what it last sent"
    sync_api.expect(one.page.locator("#live")).to_have_text(lost, timeout=60_000)
    one.close()


# ------------------------------------------------------------------------------------------------------ images


def test_images_are_drawn_beside_their_samples(visit: Open, tmp_path: Path) -> None:
    """Two samples of one prompt share the picture. A name that is another file's, or a program, is only said."""
    run = made_up_run(tmp_path / "run", steps=1, samples=3, every=1)
    name = f"samples/images/{'a' * 32}.png"
    (run / name).parent.mkdir()
    file = BytesIO()
    Image.new("RGB", (12, 8), "red").save(file, "PNG")
    (run / name).write_bytes(file.getvalue())
    rows = rows_of(run, "samples", 1)[:3]
    rows[0]["images"] = rows[1]["images"] = [{"file": name, "width": 120, "height": 80}]
    rows[2]["images"] = [{"file": "__proto__", "width": "<img src=x onerror=alert(1)>", "height": None}, 7]
    (run / "samples" / "step_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    one = visit(write_report([run], tmp_path / "r.html"))
    choose(one, pick="training 1", order="file")

    drawn = "images => images.map(image => [image.complete, image.naturalWidth, image.naturalHeight])"
    assert one.page.locator("#rows img.thumbnail").evaluate_all(drawn) == [[True, 12, 8]] * 2
    for row in one.page.locator("#rows tr.row").all():
        row.click()
    assert one.page.locator(".picture img").evaluate_all(drawn) == [[True, 12, 8]] * 2
    said = one.texts(".picture figcaption")
    assert said[:2] == ["image 1, 120 × 80 pixels"] * 2
    (hostile,) = said[2:]
    assert " ".join(hostile.split()) == "image 1, <img src=x onerror=alert(1)> × pixels, not on this page"
