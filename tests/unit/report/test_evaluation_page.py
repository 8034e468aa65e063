"""The page that compares evaluations: whatever a file holds is shown as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RequestError
from posttrain.report.evaluation import write_evaluation_report

HOSTILE = '</td><meta http-equiv="refresh" content="0;url=http://x"><script>a</script>\'"&'
SAMPLE = {"input_prompt": HOSTILE, "output_response": HOSTILE, "answer": HOSTILE, "score": 1.0,
          "env_extras": {"ground_truth": HOSTILE}, "invalid": {"reason": HOSTILE, "detail": HOSTILE}}  # fmt: skip


def results(value: Any) -> dict[str, Any]:
    metric = {"value": value, "low": value, "high": value}
    source = {
        "prompts": value,
        "responses": value,
        "metrics": {HOSTILE: metric},
        "invalid": {HOSTILE: value},
        "majority": HOSTILE,
    }
    return {"name": HOSTILE, "files": [HOSTILE], "sources": {HOSTILE: source}}


@pytest.mark.parametrize("value", [HOSTILE, 0.5, 3, None, [HOSTILE], {HOSTILE: HOSTILE}, True])
def test_nothing_in_the_files_becomes_markup(value: Any, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results(value)))
    (tmp_path / "dumped_evals").mkdir()
    (tmp_path / "dumped_evals/a.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    page = write_evaluation_report([tmp_path]).read_text()
    assert page.count("<meta") == 3  # charset, policy, viewport
    assert "<script" not in page
    assert 'http-equiv="refresh"' not in page
    assert page.count("&lt;/td&gt;&lt;meta") > 5


def test_numbers_are_shown_as_numbers(tmp_path: Path) -> None:
    source = {
        "prompts": 200,
        "responses": 1600,
        "metrics": {"mean": {"value": 0.123456, "low": 0.1, "high": 0.2}},
        "invalid": {"timeout": 3},
    }
    (tmp_path / "results.json").write_text(json.dumps({"name": "a", "files": [], "sources": {"s": source}}))
    page = write_evaluation_report([tmp_path]).read_text()
    assert "200 prompts, 1600 responses" in page
    assert "0.1235 [0.1, 0.2]" in page
    assert "3 responses without a score" in page


def test_deep_results_are_no_evaluation(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("[" * 100_000)
    with pytest.raises(RequestError, match="holds no evaluation"):
        write_evaluation_report([tmp_path])
