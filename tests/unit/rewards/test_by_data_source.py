from __future__ import annotations

import pytest

from posttrain.config.reward import RewardConfig
from posttrain.errors import ConfigError
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Reward
from posttrain.rewards.load import check_data_sources, check_rewards, load_rewards, needs_data_sources

MODEL = {"path": "rm"}


def prompt(source: str, truth: object = "5") -> Prompt:
    return Prompt(prompt_id="a:0", token_ids=(1,), text="?", data_source=source, ground_truth=truth, extra_info={})


def config(*terms: dict, **fields) -> RewardConfig:
    return RewardConfig(terms=list(terms), **fields)


@pytest.mark.parametrize(
    ("source", "response", "truth", "value"),
    [
        ("openai/gsm8k", "#### 5\n#### 6", "6", 1.0),  # the last one
        ("gsm8k", "#### 5\n#### 6", "5", 1.0),  # SkyRL's: the first one
        ("lighteval/MATH", "\\boxed{5}", "5", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", "\\boxed{5}", "5", 1.0),
        ("math_dapo", "Answer: 6", "5", -1.0),
        ("aime2024", "Answer: 5", "5", 1.0),
        ("aime", "\\boxed{5}", "5", -1.0),  # SkyRL's: a box does not count
        ("numina_olympiads", "x = 5.0", "5", 1.0),
        ("hiyouga/geometry3k", "\\boxed{5}", "5", 0.9),
        ("searchR1_nq", "<answer>five</answer>" * 11, "five", 0.25),
        ("search", "<answer>five</answer>" * 11, "five", 1.0),
    ],
)
def test_the_table(source, response, truth, value):
    outcome = load_rewards(config({"name": "by_data_source"})).score_response(prompt(source, truth), response)

    assert isinstance(outcome, Reward)
    assert outcome.value == pytest.approx(value)


def test_sources_come_before_the_table():
    sources = {"openai/gsm8k": "math", "mine/*": {"name": "gsm8k", "options": {"method": "flexible"}}}
    scorer = load_rewards(config({"name": "by_data_source", "options": {"sources": sources}}))

    assert scorer.score_response(prompt("openai/gsm8k"), "\\boxed{5}").value == 1.0
    assert scorer.score_response(prompt("mine/a"), "it is 5").value == 1.0


def test_wrong_sources_are_all_reported():
    sources = {"a": "maths", "b": 3, "c": "by_data_source", "d": {"name": "gsm8k", "options": {"methode": 1}}}

    problems = check_rewards(config({"name": "by_data_source", "options": {"sources": sources}}))

    assert [problem.field for problem in problems] == [f"reward.terms.0.options.sources.{each}" for each in "abc"]


def test_an_unknown_source_is_refused_before_the_run_and_never_scored():
    terms = config({"name": "by_data_source"})
    files = {"openai/gsm8k": "a.parquet", "openai/gsm8": "b.parquet", "searchcode": "c.parquet"}

    problems = check_data_sources(terms, files)

    assert [problem.field for problem in problems] == ["reward.terms.0.name"] * 2
    assert "no scorer for data source 'openai/gsm8' (docs/rewards.md has the table), in b.parquet" in problems[0].what
    assert problems[0].fix == "did you mean openai/gsm8k?"
    assert "the scorer of data source 'searchcode' is planned" in problems[1].what
    for source in ("openai/gsm8", "searchcode"):
        outcome = load_rewards(terms).score_response(prompt(source), "#### 5")
        assert isinstance(outcome, Invalid)
        assert outcome.reason == "no_reward_for_data_source"


def test_options_of_a_routed_scorer_are_checked_before_the_run():
    options = {"sources": {"mine": {"name": "gsm8k", "options": {"methode": "x"}}}}

    problems = check_data_sources(config({"name": "by_data_source", "options": options}), {"mine": "a.parquet"})

    assert "gsm8k has no option called 'methode'" in problems[0].what
    assert problems[0].fix == "did you mean method?"


def test_terms_count_for_their_data_sources_only():
    terms = config(
        {"name": "gsm8k", "data_sources": ["a", "b"]},
        {"name": "math", "weight": 2.0, "data_sources": ["b"]},
    )
    scorer = load_rewards(terms)
    text = "\\boxed{5} #### 5"

    assert scorer.score_response(prompt("a"), text) == Reward(1.0, (("gsm8k", 1.0),), (("gsm8k/pred", "5"),))
    both = scorer.score_response(prompt("b"), text)
    assert both == Reward(3.0, (("gsm8k", 1.0), ("math", 1.0)), (("gsm8k/pred", "5"), ("math/pred", "5")))
    outcome = scorer.score_response(prompt("c"), text)
    assert isinstance(outcome, Invalid)
    assert (outcome.reason, "'c'" in outcome.detail) == ("no_reward_for_data_source", True)

    problems = check_data_sources(terms, {"a": "a.parquet", "c": "c.parquet"})
    assert [(problem.field, problem.what) for problem in problems] == [
        ("reward.terms", "no reward term counts for data source 'c' of c.parquet"),
        ("reward.terms.1.data_sources", "the term math is for data sources that no file holds (they hold: a, c)"),
    ]
    assert needs_data_sources(terms)
    assert not needs_data_sources(config({"name": "gsm8k"}))


def test_with_a_reward_model_no_term_has_to_count():
    terms = config({"name": "gsm8k", "data_sources": ["a"]}, model=MODEL)

    assert load_rewards(terms).score_response(prompt("c"), "#### 5") == Reward(0.0, ())
    assert check_data_sources(terms, {"a": "a.parquet", "c": "c.parquet"}) == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsm8k", {"method": "strictly"}, "method is 'strictly' (known: strict, flexible)"),
        ("gsm8k", {"score": "1"}, "score is '1'; input should be a valid number"),
        ("math", {"method": "strict"}, "math has no option called 'method' (it has none)"),
        ("length", {"min_characters": 5, "max_characters": 3}, "no length lies between"),
        ("length", {"ramp_characters": 0}, "ramp_characters is 0; use at least 1"),
        ("repetition", {"words": 0}, "words is 0; use at least 1"),
        ("chance", {"share": 1.5}, "share is 1.5; use a number from 0 to 1"),
        ("search", {"max_answer_tags": 1.5}, "max_answer_tags is 1.5"),
        ("multiple_choice", {"boxed": "yes"}, "boxed is 'yes'; input should be a valid boolean"),
    ],
)
def test_wrong_options(name, options, message):
    with pytest.raises(ConfigError) as caught:
        load_rewards(config({"name": name, "options": options}))
    assert message in str(caught.value)
