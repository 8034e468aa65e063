"""The numbers of an evaluation, by hand, and the files they are written into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import (
    Invalid,
    Outcome,
    Reward,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from posttrain.report.evaluation import read_evaluation, write_evaluation_report
from posttrain.run.evaluation import file_name, results_json, skyrl_metrics, source_results, write_evaluation

LOST = Invalid("timeout", "took 10 s")


def group(name: str, *outcomes: Outcome, source: str = "a/b", text: str = "r") -> ScoredGroup:
    prompt = Prompt(
        prompt_id=name, token_ids=(), text="q<1>", data_source=source, ground_truth="4", extra_info={"i": 1}
    )
    trajectories = tuple(
        Trajectory(
            sample_id=f"{name}/{number}",
            token_ids=(),
            logprobs=(),
            text=text,
            stop_reason=StopReason.EOS,
            policy_version=0,
        )
        for number in range(len(outcomes))
    )
    return ScoredGroup(group=TrajectoryGroup(prompt=prompt, trajectories=trajectories), outcomes=outcomes)


def results(*groups: ScoredGroup, **changes: Any) -> dict[str, Any]:
    settings = {"pass_score": 1.0, "draws": 200, "confidence": 0.95, "seed": 1} | changes
    return {result.source: result for result in source_results(groups, **settings)}


def said(value: float, answer: str) -> Reward:
    return Reward(value, (("t", value),), (("t/pred", answer),))


def test_every_number_by_hand() -> None:
    """Two prompts of four answers, worth 1 1 0 0 and 1 0 0 -; the first says 7 7 7 8, the second 5 6 6.

    accuracy (2/4 + 1/4) / 2 = 3/8. pass@2: 1 - C(2,2)/C(4,2) = 5/6 and 1 - C(3,2)/C(4,2) = 1/2: 2/3. pass@4: 1, 1.
    mean@4 (1/2 + 1/3) / 2 = 5/12. best@2: 1 - (1/2)^2 = 3/4 and 1 - (2/3)^2 = 5/9; worst@2: 1/4 and 1/9. std: 1/2 and
    sqrt(2)/3. reward_mean over all valid ones: 3/7. One of eight has no score.
    """
    found = results(
        group("p:0", said(1, "7"), said(1, "7"), said(0, "7"), said(0, "8")),
        group("p:1", said(1, "5"), said(0, "6"), said(0, "6"), LOST),
    )["a/b"]
    assert (found.prompts, found.responses, dict(found.invalid)) == (2, 8, {"timeout": 1})
    expected = {
        "accuracy": 3 / 8,
        "pass@2": 2 / 3,
        "pass@4": 1.0,
        "reward_mean": 3 / 7,
        "reward_mean@4": 5 / 12,
        "reward_best@2": (3 / 4 + 5 / 9) / 2,
        "reward_worst@2": (1 / 4 + 1 / 9) / 2,
        "reward_best@4": (1 - (1 / 2) ** 4 + 1 - (2 / 3) ** 4) / 2,
        "reward_worst@4": ((1 / 2) ** 4 + (1 / 3) ** 4) / 2,
        "reward_std@4": (1 / 2 + 2**0.5 / 3) / 2,
        "invalid_share": 1 / 8,
        "invalid/timeout": 1 / 8,
    }
    assert {name: value for name, value in found.metrics.items() if "maj" not in name} == pytest.approx(expected)
    # Two draws of 5 6 6 agree on 5 (worth 1) in 1/9, are one of each in 4/9: half of these begin with the 5. 1/9 + 2/9 = 1/3.
    # Two draws of 7 7 7 8: the first drawn is the majority's answer, as both 7s or a tie: worth 1/2 of the time 1.
    assert found.metrics["reward_maj@2"] == pytest.approx((1 / 2 + 1 / 3) / 2, abs=0.03)
    assert found.majority == "by the answer that the scorer found"
    assert list(found.metrics)[:4] == ["accuracy", "pass@2", "pass@4", "reward_mean"]
    assert found.intervals["accuracy"] == (0.25, 0.5)  # of two prompts, either twice
    assert "reward_mean" not in found.intervals  # it is no mean over prompts here


def test_one_answer_per_prompt() -> None:
    found = results(group("p:0", Reward(1.0)), group("p:1", Reward(0.5)), pass_score=0.5)["a/b"]
    assert dict(found.metrics) == {"accuracy": 1.0, "reward_mean": 0.75, "invalid_share": 0.0}
    assert found.intervals["reward_mean"] == (0.5, 1.0)
    assert found.majority == "none: there is one response per prompt"


def test_a_scorer_that_names_no_answer_has_no_majority() -> None:
    found = results(group("p:0", Reward(1.0), Reward(0.0)))["a/b"]
    assert not any("maj" in name for name in found.metrics)
    assert found.majority == "none: the scorer does not say which answer it found"
    some = results(group("p:0", Reward(1.0), said(0, "x")), group("p:1", said(1, "x"), said(0, "x")))["a/b"]
    assert some.majority == "for prompts all of whose scores say which answer was found; 1 of 4 do not"
    assert some.metrics["reward_maj@2"] == pytest.approx(0.5, abs=0.05)  # of the second prompt


def test_sources_and_all_of_them_together() -> None:
    found = results(group("p:0", Reward(1.0), source="x"), group("p:1", Reward(0.0), source="y"))
    assert list(found) == ["x", "y", "all"]
    assert found["all"].metrics["accuracy"] == 0.5
    assert list(results(group("p:0", Reward(1.0)))) == ["a/b"]
    assert list(results(group("p:0", LOST))["a/b"].metrics) == ["accuracy", "invalid_share", "invalid/timeout"]


def test_skyrls_numbers_are_by_its_definitions() -> None:
    """avg_score: (0.5 - 1 + 0) / 3 valid ones; pass_at_2: one of two prompts has a score above 0."""
    groups = [group("p:0", Reward(0.5), Reward(-1.0)), group("p:1", Reward(0.0), LOST)]
    expected = {"avg_score": -0.5 / 3, "pass_at_2": 0.5}
    assert skyrl_metrics(groups) == pytest.approx(
        {f"eval/{source}/{name}": value for source in ("a_b", "all") for name, value in expected.items()}
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [("openai/gsm8k", "openai_gsm8k"), ("../x", "_x"), ("", "_"), ("aggregated_results", "aggregated_results_")],
)
def test_a_source_names_a_file_in_the_folder(source: str, name: str) -> None:
    assert file_name(source) == name


def test_files(tmp_path: Path) -> None:
    groups = [
        group("p:0", said(1, "7"), LOST, text="<b>\ud800 wild"),
        group("p:1", Reward(0.25), Reward(0.5), source="c"),
    ]
    found = source_results(groups, pass_score=1.0, draws=50, confidence=0.9, seed=1)
    for _ in range(2):  # an evaluation made again takes the place of the first
        (tmp_path / "dumped_evals").mkdir(exist_ok=True)
        (tmp_path / "dumped_evals" / "old.jsonl").write_text("{}\n")
        write_evaluation(tmp_path, results_json("mine", ["f.parquet"], found, {"draws": 50}), groups)
    assert sorted(path.name for path in (tmp_path / "dumped_evals").iterdir()) == [
        "a_b.jsonl",
        "aggregated_results.jsonl",
        "c.jsonl",
    ]
    first, second = [json.loads(line) for line in (tmp_path / "dumped_evals/a_b.jsonl").read_text().splitlines()]
    assert first == {
        "input_prompt": "q<1>",
        "output_response": "<b>\ud800 wild",
        "score": 1.0,
        "stop_reason": None,
        "env_class": None,
        "env_extras": {"ground_truth": "4", "extra_info": {"i": 1}},
        "data_source": "a/b",
        "sample_id": "p:0/0",
        "answer": "7",
        "score_terms": {"t": 1.0},
        "invalid": None,
    }
    assert (second["score"], second["invalid"]) == (None, {"reason": "timeout", "detail": "took 10 s"})
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results) == {"name", "files", "settings", "sources"}
    assert results["sources"]["a/b"]["metrics"]["accuracy"] == {"value": 0.5}
    assert results["sources"]["all"]["metrics"]["accuracy"].keys() == {"value", "low", "high"}

    page = write_evaluation_report([tmp_path, tmp_path], tmp_path / "both.html").read_text()
    assert "mine · mine" in page and "q&lt;1&gt;" in page and "<b>" not in page
    assert "<script" not in page and "default-src 'none'" in page
    assert "timeout 1" in page
    assert read_evaluation(tmp_path).name == "mine"
