from __future__ import annotations

import pickle

import pytest

from posttrain.config.reward import RewardConfig
from posttrain.data.reasoning_gym import _row
from posttrain.errors import ConfigError, MissingDependency
from posttrain.libraries import reasoning_gym as library
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.load import check_rewards, load_rewards


def prompt(truth=None, **extra_info) -> Prompt:
    return Prompt(prompt_id="a:0", token_ids=(1,), text="?", data_source="t", ground_truth=truth, extra_info=extra_info)


def scored(result) -> float:
    """The score of a result that says which answer was found."""
    assert isinstance(result["pred"], str)
    return result["score"]


def task_prompt(task: str, **options) -> tuple[Prompt, dict]:
    entry = next(library.entries(task, seed=3, options=options))
    row = _row(task, "train", 0, entry, options, None)
    return prompt(row["reward_model"]["ground_truth"], **row["extra_info"]), entry


@pytest.mark.parametrize(
    ("truth", "response", "options", "score"),
    [
        ("12", "3 x 4 = 12.0", {}, 1.0),
        (1234, "It costs $1,234.", {}, 1.0),
        (1e16, "10000000000000000", {}, 1.0),
        ("12", "3 x 4 = 13", {}, 0.0),
        ("12", "I do not know", {}, 0.0),
        ("Paris", "Let me see.\nParis", {"extract": "last_line"}, 1.0),
        ("Paris", "<answer>Paris</answer>", {"extract": "tag"}, 1.0),
        ("Paris", "Paris, France", {"extract": "all"}, 0.0),
    ],
)
def test_exact_match(truth, response, options, score):
    assert scored(REWARDS.get("exact_match")(**options)(prompt(truth), response)) == score


@pytest.mark.parametrize(
    ("name", "options", "truth", "response", "answer"),
    [
        ("exact_match", {}, "12", "3 x 4 = 12.0", "12.0"),
        ("exact_match", {"extract": "tag"}, "12", "12", ""),
        ("gsm8k", {}, "1200", "#### 1,200", "1200"),
        ("gsm8k", {}, "12", "12", ""),
        ("math", {}, "1/2", "so \\boxed{\\frac12}", "\\frac12"),
        ("math", {}, "1/2", "so 1/2", ""),
        ("math_dapo", {}, "12", "Answer: 13", "13"),
        ("prime_math", {}, "12", "The answer is 12.", "12"),
        ("multiple_choice", {}, "B", "\\boxed{C}", "C"),
        ("multiple_choice", {}, "B", "B", ""),  # not in a box
        ("multiple_choice", {"boxed": False}, "B", "B", "B"),
        ("crossthinkqa", {}, "B", "\\boxed{C}", "C"),
        ("search", {}, "Paris", "<answer>The Paris!</answer>", "paris"),
        ("geo3k", {}, "5", "<think>x</think> \\boxed{5}", "5"),
    ],
)
def test_a_rule_says_which_answer_it_found(name, options, truth, response, answer):
    assert REWARDS.get(name)(**options)(prompt(truth), response)["pred"] == answer


@pytest.mark.parametrize(
    ("truth", "response", "score"),
    [
        ("3/4", "So \\fbox{\\frac{3}{4}}", 1.0),
        ("3/4", "\\boxed{\\frac{3}{4}} or \\fbox{5}", 1.0),  # a \\boxed comes first
        ("\\boxed{3}", "The answer is \\boxed{3}.", 1.0),
        ("$\\boxed{3}$", "The answer is 3.", 1.0),
        ("\\boxed{3}", "The answer is \\boxed{4}.", 0.0),
    ],
)
def test_boxes_of_prime_math(truth: str, response: str, score: float) -> None:
    assert scored(REWARDS.get("prime_math")()(prompt(truth), response)) == score


@pytest.mark.parametrize("truth", [None, " ", ["12"], "Paris"])
def test_exact_match_does_not_score_against_what_nothing_could_match(truth):
    with pytest.raises(ValueError, match="the ground truth"):
        REWARDS.get("exact_match")()(prompt(truth), "12")


def test_reasoning_gym_verifier_judges_the_extracted_answer():
    score = REWARDS.get("reasoning_gym")()
    problem, entry = task_prompt("chain_sum", max_terms=2)

    assert (
        scored(score(problem, f"Well. <answer>{entry['answer']}.0</answer>")) == 1.0
    )  # its verifier compares decimals
    assert scored(score(problem, "<answer>x</answer>")) == 0.0
    assert scored(score(problem, entry["answer"])) == 0.0  # no tag, no answer
    assert scored(REWARDS.get("reasoning_gym")(extract="last_number")(problem, f"= {entry['answer']}")) == 1.0


def test_reasoning_gym_verifier_of_a_task_without_a_single_answer():
    """graph_color has no oracle answer: any proper colouring counts, and the verifier looks into the metadata."""
    problem, entry = task_prompt("graph_color", min_num_vertices=3, max_num_vertices=3)
    assert problem.ground_truth is None
    colours = entry["metadata"]["possible_answer"]
    answer = "{" + ", ".join(f'"{node}": {colour}' for node, colour in colours.items()) + "}"

    score = REWARDS.get("reasoning_gym")(extract="all")

    assert scored(score(problem, answer)) == 1.0
    assert scored(score(problem, "{}")) == 0.01  # this verifier gives 0.01 for any attempt
    assert scored(REWARDS.get("reasoning_gym")()(problem, answer)) == 0.0  # no tag: no answer, and no attempt either


def test_reasoning_gym_refuses_foreign_rows_and_evaluating_tasks():
    score = REWARDS.get("reasoning_gym")(extract="all")

    with pytest.raises(ValueError, match="extra_info has no 'task'"):
        score(prompt("12"), "12")
    with pytest.raises(ConfigError, match="verifier of countdown"):
        score(prompt(task="countdown", entry='{"question": "q", "answer": "a"}', options="{}"), "print(1)")


def test_reasoning_gym_makes_one_verifier_per_task(monkeypatch):
    made = []
    real = library.generator
    monkeypatch.setattr(library, "generator", lambda task, **rest: made.append(task) or real(task, **rest))
    library._verifier.cache_clear()
    score = REWARDS.get("reasoning_gym")(extract="all")
    first, _ = task_prompt("lcm")
    made.clear()

    for response in ("1", "2", "3"):
        score(first, response)

    assert made == ["lcm"]


def test_built_in_rewards_can_be_sent_to_another_process():
    problem, entry = task_prompt("chain_sum")
    for name in ("exact_match", "reasoning_gym"):
        score = pickle.loads(pickle.dumps(REWARDS.get(name)(extract="all")))  # noqa: S301 - our own bytes
        assert scored(score(problem, entry["answer"])) == 1.0


def test_wrong_terms_are_reported_together_with_their_places(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1\n"
    )
    config = RewardConfig(
        terms=[
            {"name": "exactmatch"},
            {"name": "exact_match", "options": {"extracts": "all"}},
            {"name": "exact_match", "options": {"extract": "boxed"}},
            {"name": "compute_scores", "path": str(tmp_path / "mine.py")},
            {"name": "compute_score", "path": str(tmp_path / "yours.py")},
            {"name": "exact_match"},
        ]
    )

    problems = check_rewards(config)

    assert [problem.field for problem in problems] == [
        "reward.terms.0.name",
        "reward.terms.1.options.extracts",
        "reward.terms.2.options.extract",
        "reward.terms.3.name",
        "reward.terms.4.path",
    ]
    assert "known: boxes, by_data_source, chance, code, crossthinkqa, exact_match, " in problems[0].what
    assert "needs path" in problems[0].fix
    assert "no option called 'extracts' (known: extract)" in problems[1].what
    assert "it defines: compute_score)" in problems[3].what
    with pytest.raises(ConfigError) as caught:
        load_rewards(config)
    assert caught.value.problems == problems

    monkeypatch.setattr(library, "find_spec", lambda name: None)
    [problem] = check_rewards(RewardConfig(terms=[{"name": "reasoning_gym"}]))
    assert "reasoning_gym is not installed" in problem.what
    with pytest.raises(MissingDependency):
        REWARDS.get("reasoning_gym")()
