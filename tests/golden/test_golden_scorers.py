"""Rule scorers, against the scores of verl and skyrl-gym; ``also_accept`` holds other scores that are right too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS

DATA = Path(__file__).parent / "data"


def cases(name: str, *scorers: str) -> Any:
    found = json.loads((DATA / name).read_text(encoding="utf-8"))["cases"]
    found = [case for case in found if not scorers or case["params"]["scorer"] in scorers]
    return pytest.mark.parametrize("case", found, ids=[case["name"] for case in found])


def check(case: dict[str, Any], column: str, name: str, **options: Any) -> None:
    """The scorer ``name`` gives the text of a case the score of ``column``."""
    inputs = case["inputs"]
    text = inputs["text"] if "text" in inputs else "".join(piece * times for piece, times in inputs["text_repeat"])
    prompt = Prompt(
        prompt_id="a:0", token_ids=(1,), text="?", data_source="t", ground_truth=inputs["ground_truth"], extra_info={}
    )
    result = REWARDS.get(name)(**options)(prompt, text)
    score = result["score"] if isinstance(result, dict) else result
    right = [case["outputs"][column], *case.get("also_accept", {}).get(column, [])]
    assert any(score == pytest.approx(each, abs=1e-6) for each in right), f"{score} is none of {right}"


@cases("scorers_gsm8k.json")
def test_gsm8k(case: dict[str, Any]) -> None:
    for theirs, which in (("verl", "last"), ("skyrl", "first")):
        for method in ("strict", "flexible"):
            check(case, f"{theirs}_{method}", "gsm8k", method=method, which=which)


@cases("scorers_math.json")
def test_math(case: dict[str, Any]) -> None:
    check(case, "math", "math")


@cases("scorers_math_dapo.json")
def test_math_dapo(case: dict[str, Any]) -> None:
    check(case, "verl", "math_dapo")
    check(case, "skyrl_aime", "math_dapo", box_fallback=False, stop_at_tag=True)
    for column, options in (("verl_pred", {}), ("skyrl_pred", {"box_fallback": False, "stop_at_tag": True})):
        prompt = Prompt(prompt_id="a:0", token_ids=(1,), text="?", data_source="t", ground_truth="34", extra_info={})
        inputs = case["inputs"]
        text = inputs["text"] if "text" in inputs else "".join(piece * times for piece, times in inputs["text_repeat"])
        assert REWARDS.get("math_dapo")(**options)(prompt, text)["pred"] == case["outputs"][column]


@cases("scorers_search.json")
def test_search(case: dict[str, Any]) -> None:
    check(case, "verl_em", "search")
    check(case, "verl_subem", "search", match="subem")
    check(case, "skyrl_em", "search", max_answer_tags=None)
    check(case, "skyrl_subem", "search", match="subem", max_answer_tags=None)


@cases("scorers_other.json", "prime_math", "geo3k")
def test_prime_math_and_geo3k(case: dict[str, Any]) -> None:
    scorer = case["params"]["scorer"]
    check(case, scorer, scorer)
