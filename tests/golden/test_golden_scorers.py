"""Rule scorers, against the scores of verl and skyrl-gym; ``also_accept`` holds other scores that are right too."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from posttrain.backends.environments.inline import InlineHost
from posttrain.interfaces.env import EnvSpec, EnvStart, EnvStep
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.scorers.text2sql import solution
from posttrain.rewards.sources import TABLE

if TYPE_CHECKING:
    from conftest import Case

linux = pytest.mark.skipif(sys.platform != "linux", reason="boxes are made by Linux")


def text_of(case: Case) -> str:
    inputs = case.inputs
    return inputs["text"] if "text" in inputs else "".join(piece * times for piece, times in inputs["text_repeat"])


def result_of(case: Case, name: str, truth: Any, options: Any) -> Any:
    prompt = Prompt(prompt_id="a:0", token_ids=(1,), text="?", data_source="t", ground_truth=truth, extra_info={})
    return REWARDS.get(name)(**options)(prompt, text_of(case))


def check(case: Case, column: str, name: str, **options: Any) -> None:
    """The scorer ``name`` gives the text of a case the score of ``column``."""
    result = result_of(case, name, case.inputs["ground_truth"], options)
    score = result["score"] if isinstance(result, dict) else result
    right = [case.outputs[column], *case.content.get("also_accept", {}).get(column, [])]
    assert any(score == pytest.approx(each, abs=1e-6) for each in right), f"{score} is none of {right}"


@pytest.mark.golden("scorers_gsm8k.json")
def test_gsm8k(case: Case) -> None:
    for theirs, which in (("verl", "last"), ("skyrl", "first")):
        for method in ("strict", "flexible"):
            check(case, f"{theirs}_{method}", "gsm8k", method=method, which=which)


@pytest.mark.golden("scorers_math.json")
def test_math(case: Case) -> None:
    check(case, "math", "math")


@pytest.mark.golden("scorers_math_dapo.json")
def test_math_dapo(case: Case) -> None:
    skyrl = {"box_fallback": False, "stop_at_tag": True}
    check(case, "verl", "math_dapo")
    check(case, "skyrl_aime", "math_dapo", **skyrl)
    for column, options in (("verl_pred", {}), ("skyrl_pred", skyrl)):
        assert result_of(case, "math_dapo", "34", options)["pred"] == case.outputs[column]


@pytest.mark.golden("scorers_search.json")
def test_search(case: Case) -> None:
    check(case, "verl_em", "search")
    check(case, "verl_subem", "search", match="subem")
    check(case, "skyrl_em", "search", max_answer_tags=None)
    check(case, "skyrl_subem", "search", match="subem", max_answer_tags=None)


@pytest.mark.golden("scorers_other.json", "prime_math", "geo3k")
def test_prime_math_and_geo3k(case: Case) -> None:
    scorer = case.params["scorer"]
    check(case, scorer, scorer)


@pytest.mark.golden("scorers_other.json", "sql_format")
def test_the_form_of_text2sql(case: Case) -> None:
    assert solution(text_of(case)) == case.outputs["solution"]
    assert case.outputs["valid"] is (case.outputs["solution"] is not None)


@linux
@pytest.mark.golden("scorers_other.json", "code")
def test_code(case: Case) -> None:
    """Routed as verl's apps and as SkyRL's lcb, each with its own form of tests."""
    tests = case.inputs["tests"]
    listed = [
        {"input": given, "output": wanted, "testtype": "stdin"}
        for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True)
    ]
    for column, source, truth in (("prime_code", "apps", tests), ("lcb", "lcb", listed)):
        route = TABLE[source]
        result = result_of(case, route.scorer, json.dumps(truth), route.options)
        assert result["score"] == pytest.approx(case.outputs[column], abs=1e-6), column


@pytest.mark.golden("scorers_other.json", "gsm8k_multi_turn")
def test_gsm8k_in_several_turns(case: Case) -> None:
    pytest.importorskip("skyrl_gym")
    messages: Any = ({"role": "user", "content": "?"},)
    row = {"data_source": "x", "reward_spec": {"ground_truth": case.inputs["ground_truth"]}, "extra_info": {}}
    settings = {"env_class": "gsm8k_multi_turn", "configs": {}, "allow_unboxed_code": True}
    host = InlineHost()
    host.start(
        "e",
        EnvSpec(name="skyrl_gym", settings=settings, messages=messages, row=row, max_turns=case.params["max_turns"]),
        0,
    )
    ((_, start),) = host.wait(0.0)
    assert isinstance(start, EnvStart)
    for action, wanted in zip(case.inputs["actions"], case.outputs["turns"], strict=True):
        host.step("e", action)
        ((_, step),) = host.wait(0.0)
        assert isinstance(step, EnvStep), step
        assert step.reward == pytest.approx(wanted["reward"], abs=1e-6)
        assert (step.done, len(step.messages)) == (wanted["done"], wanted["observations"])
