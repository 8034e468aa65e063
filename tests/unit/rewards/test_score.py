from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from posttrain.config.reward import RewardConfig
from posttrain.errors import ConfigError
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.load import load_rewards
from posttrain.rewards.score import RewardTerms, Term
from posttrain.rewards.user import check_function

PROMPT = Prompt(
    prompt_id="a:0", token_ids=(1,), text="?", data_source="sums", ground_truth="12", extra_info={"notes": [1]}
)


def outcome(*results, weights=None):
    """The outcome of terms that return, or raise, these."""

    def term(result):
        def reward(prompt, response):
            if isinstance(result, BaseException):
                raise result
            return result

        return reward

    weights = weights or [1.0] * len(results)
    terms = [
        Term(f"t{i}", weight, term(result)) for i, (result, weight) in enumerate(zip(results, weights, strict=True))
    ]
    return RewardTerms(terms).score_response(PROMPT, "response")


def group(*responses: str) -> TrajectoryGroup:
    return TrajectoryGroup(
        prompt=PROMPT,
        trajectories=tuple(
            Trajectory(
                sample_id=f"a:0/{i}",
                token_ids=(1,),
                logprobs=(0.0,),
                text=text,
                stop_reason=StopReason.EOS,
                policy_version=0,
            )
            for i, text in enumerate(responses)
        ),
    )


def load(tmp_path, source: str, name: str = "compute_score", **options) -> RewardTerms:
    (tmp_path / "mine.py").write_text(source)
    return load_rewards(RewardConfig(terms=[{"name": name, "path": str(tmp_path / "mine.py"), "options": options}]))


def test_weighted_sum_with_the_values_before_their_weights():
    # 2 x 0.5 + -0.5 x 3 = -0.5
    assert outcome(0.5, 3, weights=[2.0, -0.5]) == Reward(-0.5, (("t0", 0.5), ("t1", 3.0)))


@pytest.mark.parametrize(
    ("result", "value"),
    [(True, 1.0), (False, 0.0), (2, 2.0), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.True_, 1.0),
     (np.array([0.25]), 0.25), (torch.tensor(0.5), 0.5), ({"score": torch.tensor([[2.0]])}, 2.0)],
)  # fmt: skip
def test_what_counts_as_a_number(result, value):
    assert outcome(result) == Reward(value, (("t0", value),))


@pytest.mark.parametrize(
    ("result", "reason", "detail"),
    [
        (None, "not_a_number", "t0: returned None; a number is expected"),
        ("1.0", "not_a_number", "t0: returned the text '1.0'; a number is expected"),
        ([1.0], "not_a_number", "t0: returned a list; a number is expected"),
        ((1.0, "why"), "not_a_number", "t0: returned a tuple; a number is expected"),
        (np.array([1.0, 2.0]), "not_a_number", "t0: returned a ndarray; a number is expected"),
        (1j, "not_a_number", "t0: returned a complex; a number is expected"),
        (
            {"acc": 1.0},
            "not_a_number",
            't0: returned a mapping without "score", which holds acc; a number is expected there',
        ),
        ({"score": None}, "not_a_number", "t0: returned None; a number is expected"),
        (math.nan, "not_finite", "t0: returned nan"),
        (-math.inf, "not_finite", "t0: returned -inf"),
        (10**400, "not_finite", "t0: returned inf"),
        (1e39, "not_finite", "t0: returned 1e+39"),  # float32 ends at 3.4e38
        (ZeroDivisionError("oops"), "exception", "t0: ZeroDivisionError: oops"),
        (SystemExit(3), "exception", "t0: SystemExit: 3"),
    ],
)
def test_what_is_not_a_number_is_invalid_and_never_zero(result, reason, detail):
    assert outcome(result) == Invalid(reason, detail)
    assert outcome(1.0, {"score": 1.0}) == Reward(2.0, (("t0", 1.0), ("t1", 1.0)))
    assert outcome(1.0, result) == Invalid(reason, detail.replace("t0", "t1"))


def test_a_sum_that_is_not_finite_is_invalid():
    assert outcome(3e38, 3e38).reason == "not_finite"


def test_numbers_and_texts_beside_the_score_are_kept_and_the_rest_left_out():
    result = {"score": 0.5, "acc": True, "pred": "12", "loss": math.nan, "steps": ["a"], "log": "x" * 2000}

    texts = (("t0/pred", "12"), ("t0/log", "x" * 1000))
    assert outcome(result, weights=[2.0]) == Reward(1.0, (("t0", 0.5), ("t0/acc", 1.0)), texts)


def test_an_interrupt_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        outcome(KeyboardInterrupt())


def test_a_group_gets_an_outcome_per_response_in_order():
    scorer = load_rewards(
        RewardConfig(
            terms=[{"name": "exact_match"}, {"name": "exact_match", "weight": 0.5, "options": {"extract": "all"}}]
        )
    )

    # last_number + 0.5 x all
    outcomes = scorer.score(group("it is 12", "13", "12"))
    assert [(outcome.value, outcome.terms) for outcome in outcomes] == [
        (1.0, (("exact_match", 1.0), ("exact_match_2", 0.0))),
        (0.0, (("exact_match", 0.0), ("exact_match_2", 0.0))),
        (1.5, (("exact_match", 1.0), ("exact_match_2", 1.0))),
    ]
    assert outcomes[0].texts == (("exact_match/pred", "12"), ("exact_match_2/pred", "it is 12"))


# ------------------------------------------------------------------------------------------------ the user's own file


def test_user_function_is_called_as_verl_calls_it(tmp_path):
    scorer = load(
        tmp_path,
        """
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    extra_info["notes"].append(2)
    known = data_source == "sums" and ground_truth == "12" and extra_info == {"notes": [1, 2]}
    return {"score": float(solution_str == "yes") + bonus, "known": known}
""",
        bonus=0.25,
    )

    first, second = scorer.score(group("yes", "no"))

    assert first == Reward(1.25, (("compute_score", 1.25), ("compute_score/known", 1.0)))
    assert second == Reward(
        0.25, (("compute_score", 0.25), ("compute_score/known", 1.0))
    )  # the first call left no trace
    assert PROMPT.extra_info == {"notes": [1]}


def test_an_error_in_the_users_function_names_the_users_line(tmp_path):
    scorer = load(
        tmp_path,
        """import json

def parse(text):
    return json.loads(text)

def compute_score(**kwargs):
    return parse(kwargs["solution_str"])["x"]
""",
    )

    wrong, missing = scorer.score(group("not json", "{}"))

    assert wrong.reason == "exception"
    assert wrong.detail.startswith(
        f"compute_score: {tmp_path / 'mine.py'}:4: json.decoder.JSONDecodeError: Expecting value"
    )
    assert missing.detail == f"compute_score: {tmp_path / 'mine.py'}:7: KeyError: 'x'"


def test_a_long_error_text_is_cut(tmp_path):
    scorer = load(tmp_path, "def compute_score(**kwargs):\n    raise ValueError(kwargs['solution_str'])\n")

    [failed] = scorer.score(group("x" * 10_000))

    assert len(failed.detail) < 600
    assert failed.detail.endswith("x…")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def a(): ...\ndef compute_scores(**k): ...\n",
            r"defines no 'compute_score' \(it defines: a, compute_scores\); did you mean compute_scores",
        ),
        ("x = 1\n", r"defines no 'compute_score' \(it defines: no function\)"),
        ("compute_score = 1\n", "'compute_score' in .* is not a function"),
        (
            "def compute_score(answer): ...\n",
            r"compute_score\(answer\) in .* cannot be called with the keywords data_source, solution_str",
        ),
        (
            "def compute_score(data_source, solution, ground_truth): ...\n",
            r"cannot be called with the keywords .*four parameters of other names",
        ),
        ("def compute_score(:\n", r"mine\.py:1 is not Python: "),
        (
            "import json\n\njson.loads('')\ndef compute_score(**k): ...\n",
            r"mine\.py:3: importing the file failed: json",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, source, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, source)


def test_a_name_that_only_running_the_file_can_tell(tmp_path):
    (tmp_path / "mine.py").write_text("from os.path import *\n")

    check_function(str(tmp_path / "mine.py"), "basename")  # nothing is raised


def test_the_nearest_name_is_given_once(tmp_path):
    (tmp_path / "mine.py").write_text("def a(): ...\ndef b(): ...\n")

    with pytest.raises(ConfigError) as caught:
        check_function(str(tmp_path / "mine.py"), "compute_score")

    assert str(caught.value).endswith("mine.py defines no 'compute_score' (it defines: a, b)")


def test_options_that_the_users_function_does_not_take(tmp_path):
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1\n"

    with pytest.raises(ConfigError, match="extra_info, bonus: got an unexpected keyword argument 'bonus'"):
        load(tmp_path, source, bonus=1)


def test_names_other_than_plain_functions_and_a_file_that_changed_meanwhile(tmp_path):
    [first] = load(tmp_path, "compute_score = lambda **k: 1\n").score(group("x"))
    [second] = load(tmp_path, "def _two(**k): return 2\ncompute_score = _two\n").score(group("x"))

    assert (first.value, second.value) == (1, 2)


def values(scorer: RewardTerms, response: str = "x") -> float:
    outcome = scorer.score_response(PROMPT, response)
    assert isinstance(outcome, Reward), outcome
    return outcome.value


def test_parameters_of_other_names_are_given_by_position(tmp_path):
    """As verl's prime manager calls: source, solution, truth, extra information."""
    source = "def compute_score(source, text, truth, info=None, bonus=0):\n    return len(source) + len(text) + bonus\n"

    assert values(load(tmp_path, source, bonus=10)) == 4 + 1 + 10  # sums, x
    assert values(load(tmp_path, source, data_source="", bonus=10)) == 0 + 1 + 10  # options win


def test_async_functions_are_awaited(tmp_path):
    source = (
        "import asyncio\n\nasync def compute_score(**given):\n    await asyncio.sleep(0)\n"
        "    return {'score': float(given['ground_truth']), 'half': 6}\n"
    )
    outcome = load(tmp_path, source).score_response(PROMPT, "x")
    assert outcome == Reward(12.0, (("compute_score", 12.0), ("compute_score/half", 6.0)))

    failing = load(tmp_path, "async def compute_score(**given):\n    return given['nothing']\n")
    outcome = failing.score_response(PROMPT, "x")
    assert isinstance(outcome, Invalid)
    assert outcome.detail.endswith("mine.py:2: KeyError: 'nothing'")


def test_functions_of_modules_and_file_urls(tmp_path, monkeypatch):
    package = tmp_path / "my_package_of_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "sums.py").write_text("def compute_score(**given):\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = "pkg://my_package_of_rewards.sums"

    check_function(path, "compute_score")  # imports nothing, so nothing is raised
    with pytest.raises(
        ConfigError, match=r"importing pkg://my_package_of_rewards\.sums failed: RuntimeError: imported"
    ):
        load_rewards(RewardConfig(terms=[{"name": "compute_score", "path": path}]))
    (package / "__init__.py").write_text("")
    assert values(load_rewards(RewardConfig(terms=[{"name": "compute_score", "path": path}]))) == 3

    url = f"file://{package / 'sums.py'}"
    assert values(load_rewards(RewardConfig(terms=[{"name": "compute_score", "path": url}]))) == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("pkg://no_such_package.sums", r"there is no module no_such_package \(asked for: pkg://no_such_package.sums\)"),
        ("pkg://json.decodr", r"there is no module json.decodr .*did you mean json.decoder\?"),
        ("pkg://math", "is not a Python file|built-in"),
        ("json.decoder", r"there is no file json.decoder; a module is written pkg://json.decoder"),
        ("file:///nowhere/mine.py", "there is no file file:///nowhere/mine.py"),
    ],
)
def test_modules_that_are_not_there(path, message):
    with pytest.raises(ConfigError, match=message):
        check_function(path, "compute_score")


@pytest.mark.parametrize(
    ("result", "value"), [("(0.5, 'why')", 0.5), ("[True, 3]", 1.0), ("({'score': 2},)", 2.0), ("4", 4.0)]
)
def test_the_first_entry_of_a_tuple_is_the_score_on_request(tmp_path, result, value):
    (tmp_path / "mine.py").write_text(f"def compute_score(solution_str, ground_truth): return {result}")
    terms = [{"name": "compute_score", "path": str(tmp_path / "mine.py"), "returns": "first"}]
    assert load_rewards(RewardConfig(terms=terms)).score_response(PROMPT, "x").value == value


def test_entries_of_extra_info_are_added_to_the_rows(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, extra_info): return len(extra_info) + extra_info['weight']"
    )
    terms = [{"name": "compute_score", "path": str(tmp_path / "mine.py"), "extra_info": {"weight": 4}}]
    assert load_rewards(RewardConfig(terms=terms)).score_response(PROMPT, "x").value == 4 + 1 + len(PROMPT.extra_info)
