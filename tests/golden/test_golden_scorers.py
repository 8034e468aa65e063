"""Rule scorers, against the scores of verl and skyrl-gym; ``also_accept`` holds other scores that are right too."""

from __future__ import annotations

import json
import sys
from typing import Any, Protocol

import pytest

from posttrain.interfaces.env import EnvSpec, EnvStart, EnvStep
from posttrain.records.prompts import Prompt
from posttrain.registry import ENVS, REWARDS
from posttrain.rewards.scorers.text2sql import solution


class Case(Protocol):
    """A golden case, as the conftest makes it."""

    @property
    def inputs(self) -> dict[str, Any]: ...
    @property
    def outputs(self) -> dict[str, Any]: ...
    @property
    def params(self) -> dict[str, Any]: ...
    def right(self, column: str) -> list[Any]: ...


def text_of(case: Case) -> str:
    inputs = case.inputs
    return inputs["text"] if "text" in inputs else "".join(piece * times for piece, times in inputs["text_repeat"])


def prompt(ground_truth: Any) -> Prompt:
    return Prompt(prompt_id="a:0", token_ids=(1,), text="?", data_source="t", ground_truth=ground_truth, extra_info={})


def check(case: Case, column: str, name: str, *, ground_truth: Any = None, **options: Any) -> None:
    """The scorer ``name`` gives the text of a case the score of ``column``."""
    truth = case.inputs["ground_truth"] if ground_truth is None else ground_truth
    result = REWARDS.get(name)(**options)(prompt(truth), text_of(case))
    score = result["score"] if isinstance(result, dict) else result
    right = case.right(column)
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
    check(case, "verl", "math_dapo")
    check(case, "skyrl_aime", "math_dapo", box_fallback=False, stop_at_tag=True)
    for column, options in (("verl_pred", {}), ("skyrl_pred", {"box_fallback": False, "stop_at_tag": True})):
        assert REWARDS.get("math_dapo")(**options)(prompt("34"), text_of(case))["pred"] == case.outputs[column]


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
    assert solution(text_of(case)) == (case.outputs["solution"] if case.outputs["valid"] else None)


@pytest.mark.skipif(sys.platform != "linux", reason="boxes are made by Linux")
@pytest.mark.golden("scorers_other.json", "code")
def test_code(case: Case) -> None:
    tests = json.dumps(case.inputs["tests"])
    check(case, "lcb", "code", ground_truth=tests)
    check(case, "prime_code", "code", ground_truth=tests, continuous=True)


@pytest.mark.golden("scorers_other.json", "gsm8k_multi_turn")
def test_gsm8k_over_turns(case: Case) -> None:
    pytest.importorskip("skyrl_gym")
    truth = case.inputs["ground_truth"]
    row = {"data_source": "x", "reward_spec": {"ground_truth": truth}, "extra_info": {}}
    spec = EnvSpec(
        name="skyrl_gym",
        messages=[{"role": "user", "content": "How many?"}],
        row=row,
        max_turns=case.params["max_turns"],
    )
    env = ENVS.get("skyrl_gym")(spec, env_class="gsm8k_multi_turn")
    assert isinstance(env.reset(0), EnvStart)
    for action, expected in zip(case.inputs["actions"], case.outputs["turns"], strict=True):
        step = env.step(action)
        assert isinstance(step, EnvStep)
        assert step.reward == pytest.approx(expected["reward"], abs=1e-6)
        assert (step.done, len(step.messages)) == (expected["done"], expected["observations"])
