"""The report page: complete, offline, and harmless whatever a model wrote."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RequestError
from posttrain.report import embedded
from posttrain.report.contents import wilson_interval
from posttrain.report.embedded import spread
from posttrain.report.harmless import embed
from posttrain.report.html import page_script, write_report

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script><!--",
    "<img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b]0;title\x07\x00",
    "\u202egnp.exe\u202c\u2028\u2029\ufeff",
    "\ud800 a lone surrogate",
    "{{data}} {{script}} {{policy}}",
    "]]>&quot;&lt;",
    "y" * 100_000,
]


class Page(HTMLParser):
    """The elements of a page, and what its scripts and styles hold, as a browser would cut them."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, str]] = []  # tag, content
        self._open = ""
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self._open = tag
            self.raw.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.raw[-1] = (self._open, self.raw[-1][1] + data)

    def content(self, tag: str) -> list[str]:
        return [content for name, content in self.raw if name == tag]

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.content("script")[0])

    @property
    def run(self) -> dict[str, Any]:
        """What the page knows of its one run."""
        (run,) = self.data["runs"]
        return run


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_report_goes_into_the_run_folder_or_where_told(run_dir: Path, tmp_path: Path) -> None:
    assert write_report([run_dir]) == run_dir / "report.html"
    assert write_report([run_dir], tmp_path / "new" / "page.html").is_file()
    assert not list(tmp_path.rglob("*.new"))


def test_a_folder_is_no_place_for_a_report(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"new is a folder; a report is a file; name a file, such as report\.html"):
        (tmp_path / "new").mkdir()
        write_report([run_dir], tmp_path / "new")
    assert not (tmp_path / "new.new").exists()


def test_report_of_what_is_not_a_run_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no metrics\.jsonl"):
        write_report([tmp_path])
    assert not list(tmp_path.iterdir())


def test_report_holds_headline_curves_samples_and_config(run_dir: Path) -> None:
    page = Page(write_report([run_dir]))
    data, run = page.data, page.run
    assert run["steps"] == [0, 1, 2, 3, 4]
    assert run["series"]["reward/mean"][0] is None and run["series"]["reward/mean"][4] is not None
    (headline,) = run["headline"]
    rows = [json.loads(line) for line in (run_dir / "validation" / "step_4.jsonl").read_text().splitlines()]
    assert headline["source"] == "chain_sum"
    assert [point["step"] for point in headline["points"]] == [0, 4]
    assert headline["points"][1]["prompts"] == 100
    assert headline["points"][1]["accuracy"] == sum(row["reward"] == 1 for row in rows) / 100
    assert len(data["samples"]) == 4 * 16 + 3 * 100
    assert data["samples"][0]["kind"] == "validation" and data["samples"][0]["step"] == 0
    assert data["left_out"] == [] and data["notes"] == []
    assert "seed: 1" in run["config"]


def test_report_is_harmless_whatever_a_model_wrote(run_dir: Path) -> None:
    plain = Page(write_report([run_dir]))
    rows = [
        dict.fromkeys(("prompt", "response", "ground_truth", "sample_id", "prompt_id", "data_source"), text)
        | {"step": 4, "reward": 0.5, "reward_terms": {text[:50]: 1.0}, "invalid": {"reason": text, "detail": text}}
        for text in HOSTILE
    ]
    append_rows(run_dir / "samples" / "step_4.jsonl", rows)
    page = Page(write_report([run_dir]))
    assert page.tags == plain.tags  # not one element more
    assert page.content("script")[1] == plain.content("script")[1]
    block = page.content("script")[0]
    assert not set("<>&") & set(block) and block.isascii()
    kept = [sample["response"] for sample in page.data["samples"] if sample.get("reward") == 0.5]
    assert kept[:-1] == HOSTILE[:-1]  # harmless, and still what the model wrote
    assert kept[-1] == "y" * 20_000 + "… [80000 more characters in the run folder]"
    assert page.data["left_out"][0] == "3 texts longer than 20000 characters were cut."
    assert page.data["token_texts"][0] == plain.data["token_texts"][0]


def test_report_title_is_text(run_dir: Path) -> None:
    info = json.loads((run_dir / "run.json").read_text()) | {"name": "</title><script>alert(1)</script>\x1b {{data}}"}
    (run_dir / "run.json").write_text(json.dumps(info))
    page = Page(write_report([run_dir]))
    assert page.content("title") == ["</title><script>alert(1)</script> {{data}} · posttrain"]
    assert len(page.content("script")) == 2


def test_report_policy_allows_its_own_script_and_style_and_nothing_else(run_dir: Path) -> None:
    page = Page(write_report([run_dir]))
    (policy,) = [
        tag["content"]
        for name, tag in page.tags
        if tag.get("http-equiv") == "Content-Security-Policy" and name == "meta"
    ]

    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    assert policy == (
        f"default-src 'none'; script-src {digest(page.content('script')[1])}; "
        f"style-src {digest(page.content('style')[0])}; img-src data:; base-uri 'none'; form-action 'none'"
    )


def test_report_names_no_address_but_the_svg_namespace(run_dir: Path) -> None:
    page = Page(write_report([run_dir]))
    assert set(re.findall(r"\w+://[^\s\"']+", page.text)) == {"http://www.w3.org/2000/svg"}
    assert not [
        tag for name, tag in page.tags if name in ("link", "img", "iframe", "base") or {"src", "href"} & set(tag)
    ]


def test_report_script_never_makes_html_from_text() -> None:
    script = page_script()
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser", script
    )


def test_report_takes_the_newest_and_evenly_spaced_steps(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "MAX_SAMPLES", 250)
    data = Page(write_report([run_dir])).data
    # In turn: validation 4 (100), training 4 (16), validation 0 (100), training 1 (16), validation 2 (18 of 100).
    counts: dict[tuple[str, int], int] = {}
    for sample in data["samples"]:
        counts[sample["kind"], sample["step"]] = counts.get((sample["kind"], sample["step"]), 0) + 1
    assert counts == {
        ("validation", 4): 100,
        ("training", 4): 16,
        ("validation", 0): 100,
        ("training", 1): 16,
        ("validation", 2): 18,
    }
    assert data["left_out"] == [
        "Samples of 2 of 4 training steps are on this page. Of 1 step only the first samples are here.",
        "Everything is in samples/ and validation/ in the run folder.",
    ]


def test_report_stays_within_its_size(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_report([run_dir]).stat().st_size
    monkeypatch.setattr(embedded, "MAX_SAMPLE_BYTES", 50_000)
    page = write_report([run_dir])
    samples = Page(page).data["samples"]
    assert 40_000 < len(json.dumps(samples, separators=(",", ":"))) < 55_000
    assert page.stat().st_size < whole


def test_report_of_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    page = Page(write_report([tmp_path]))
    data = page.data
    assert page.run["steps"] == [] and data["samples"] == [] and page.run["headline"] == []
    assert data["notes"] == ["config.yaml is missing.", "run.json is missing.", "No step has been logged yet."]


def test_report_names_steps_that_were_not_finite(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "policy/loss": 0.5}\n{"step": 2, "policy/loss": null}\n')
    run = Page(write_report([run_dir])).run
    assert run["nonfinite"] == {"policy/loss": [2]}
    assert run["series"] == {"policy/loss": [0.5, None]}


def test_report_accepts_nan_that_another_writer_left(run_dir: Path) -> None:
    odd = {"sample_id": "odd", "reward": float("nan"), "reward_terms": {"a": float("inf")}}
    append_rows(run_dir / "samples" / "step_4.jsonl", [odd])
    (sample,) = [sample for sample in Page(write_report([run_dir])).data["samples"] if sample["sample_id"] == "odd"]
    assert (sample["reward"], sample["reward_terms"]) == ("nan", {"a": "inf"})


def test_report_lists_only_the_first_of_many_notes(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text("garbage\n" * 1000)
    notes = Page(write_report([run_dir])).data["notes"]
    assert len(notes) == 21 and notes[-1] == "And 981 more."


def test_embed_escapes_what_html_reads() -> None:
    assert embed({"a": "</script>&\u2028é"}) == '{"a":"\\u003c/script\\u003e\\u0026\\u2028\\u00e9"}'
    assert json.loads(embed(HOSTILE)) == HOSTILE


def test_spread_takes_ends_then_halves_the_gaps() -> None:
    assert list(spread(range(1, 10))) == [9, 1, 5, 3, 7, 2, 4, 6, 8]
    assert list(spread([7])) == [7]
    assert list(spread([])) == []
    assert sorted(spread(range(100))) == list(range(100))


def test_wilson_interval_by_hand() -> None:
    # 50 of 100, z = 2: centre (0.5 + 4/200) / (1 + 4/100) = 0.52 / 1.04 = 0.5;
    # half width 2 / 1.04 * sqrt(0.25/100 + 4/40000) = 1.923077 * sqrt(0.0026) = 0.0980581
    low, high = wilson_interval(0.5, 100, z=2.0)
    assert low == pytest.approx(0.5 - 0.0980581, abs=1e-6)
    assert high == pytest.approx(0.5 + 0.0980581, abs=1e-6)
    assert wilson_interval(0.0, 100)[0] == 0.0 and wilson_interval(0.0, 100)[1] > 0.03
