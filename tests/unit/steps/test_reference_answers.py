"""The reward's verdict on the data's own reference answers, before the first step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from posttrain.config.reward import RewardConfig
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Trajectory
from posttrain.rewards.load import load_rewards
from posttrain.rewards.score import RewardTerms, Term
from posttrain.rewards.scorer import ScorerHere
from posttrain.steps.reference_answers import reference_warning


def prompts(*answers: object) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"a:{n}", token_ids=(1,), text="?", data_source="s", ground_truth=answer)
        for n, answer in enumerate(answers)
    ]


def warning(reward: Callable[[Prompt, str], float], *answers: object) -> str:
    scorer = ScorerHere(RewardTerms([Term("mine", 1.0, reward)]))
    return reference_warning(scorer, prompts(*answers), lambda text: [ord(letter) for letter in text])


def exact(prompt: Prompt, response: str) -> float:
    return float(response == str(prompt.ground_truth))


def boxed(prompt: Prompt, response: str) -> float:
    return 1.0 if f"boxed{{{prompt.ground_truth}}}" in response else -1.0


@pytest.mark.parametrize(
    "reward",
    [
        exact,
        boxed,
        lambda prompt, response: len(response),  # says nothing about answers
        lambda prompt, response: 1.0,
        lambda prompt, response: float("<answer>" in response),  # a reward for the form alone
    ],
)
def test_nothing_is_said_of_rewards_that_work(reward: Callable[[Prompt, str], float]) -> None:
    assert warning(reward, "12", "7", "90", "3") == ""


@pytest.mark.parametrize("name", ["exact_match", "gsm8k", "math", "math_dapo", "format"])
def test_nothing_is_said_of_built_in_rules(name: str) -> None:
    scorer = ScorerHere(load_rewards(RewardConfig(terms=[{"name": name}])))
    assert reference_warning(scorer, prompts("12", "7", "90"), lambda text: [1]) == ""


def test_a_sign_that_is_turned_round() -> None:
    """Right answers get -1 in the only form that is found, wrong ones 0."""
    said = warning(lambda prompt, response: -exact(prompt, response), "12", "7")
    assert said.startswith(
        "the reward gives reference answers less than wrong ones: -1 and 0 on average, written as '12'"
    )


def test_an_answer_that_is_never_found() -> None:
    """The grader looks for a form that nobody writes, or the column holds something else."""
    said = warning(lambda prompt, response: float(response == f"ANSWER={prompt.ground_truth}"), "12", "7", "7", "9")
    assert said.startswith(
        "the reward gives none of 3 reference answers ('12', '7', ...) more than 0, in any of 8 usual forms"
    )


def test_a_reward_that_fails() -> None:
    def broken(prompt: Prompt, response: str) -> float:
        raise KeyError("answer")

    assert warning(broken, "12", "7").startswith(
        "the reward can score no reference answer of the first prompts (exception: mine: KeyError: 'answer')"
    )


@pytest.mark.parametrize(
    "answers", [("12",), ("12", "12"), (None, None), ('{"tests": []}', '["a"]'), ("x" * 300, "y" * 300)]
)
def test_data_without_different_short_answers_say_nothing(answers: tuple[object, ...]) -> None:
    assert warning(lambda prompt, response: -exact(prompt, response), *answers) == ""


def test_few_prompts_are_scored_each_once_per_form_right_and_wrong() -> None:
    seen: list[str] = []

    def reward(prompt: Prompt, response: str) -> float:
        seen.append(prompt.prompt_id)
        return exact(prompt, response)

    warning(reward, *range(100))
    assert len(seen) == 4 * 2 * 8 and sorted(set(seen)) == ["a:0", "a:1", "a:2", "a:3"]


def test_the_responses_carry_the_token_ids_of_their_text() -> None:
    """For rewards that read the sequence."""
    found: list[Trajectory] = []

    class Scorer(ScorerHere):
        def score(self, groups):
            found.extend(each for group in groups for each in group.trajectories)
            return super().score(groups)

    reference_warning(
        Scorer(RewardTerms([Term("mine", 1.0, exact)])), prompts("12", "7"), lambda text: list(map(ord, text))
    )
    assert all("".join(map(chr, each.token_ids)) == each.text for each in found)
