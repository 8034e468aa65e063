"""Where a run's responses are scored, and that it changes no number."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.reward import RewardConfig
from posttrain.errors import ConfigError
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.registry import REWARDS
from posttrain.rewards.load import load_rewards
from posttrain.rewards.scorer import Scorer, ScorerHere, ScorerInWorkers, start_rewards

pytestmark = pytest.mark.usefixtures("warm_children")

SOURCE = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "crash":
        os._exit(1)
    if solution_str == "waits":
        return {"score": waits()}
    return {"score": float(solution_str == ground_truth), "days": extra_info["day"].day}

def waits():
    folder = os.path.dirname(__file__)
    open(os.path.join(folder, "began"), "w").close()
    for _ in range(6000):
        if os.path.exists(os.path.join(folder, "go on")):
            return 1.0
        time.sleep(0.01)
    return 0.0

def lengths(data_sources, solution_strs, ground_truths, extra_infos, factor=1):
    if "raise" in solution_strs:
        raise KeyError("oops")
    if "hang" in solution_strs:
        time.sleep(60)
    if "drop" in solution_strs:
        solution_strs = [text for text in solution_strs if text != "drop"] or ["none"]
    if "end" in solution_strs:
        os._exit(1)
    values = [len(text) * factor for text in solution_strs]
    return {"fewer": values[1:], "none": None, "odd": [*values[1:], "a"]}.get(solution_strs[0], values)

async def with_extras(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": n, "first": n == 0} for n, text in enumerate(solution_strs)]
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE)
    return str(tmp_path / "mine.py")


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[Scorer] = []

    def make(*terms: dict[str, Any], **reward: Any) -> Scorer:
        started.append(start_rewards(RewardConfig(terms=list(terms), **{"workers": 1, **reward})))
        return started[-1]

    yield make
    for scorer in started:
        scorer.close()


def group(name: str, *responses: str, source: str = "t") -> TrajectoryGroup:
    return TrajectoryGroup(
        prompt=Prompt(
            prompt_id=name,
            token_ids=(1, 2),
            text="?",
            data_source=source,
            ground_truth="12",
            extra_info={"day": date(2020, 1, 7)},
            messages=({"role": "user", "content": "?"},),
        ),
        trajectories=tuple(
            Trajectory(
                sample_id=f"{name}/{number}",
                token_ids=(1,),
                logprobs=(0.0,),
                text=text,
                stop_reason=StopReason.EOS,
                policy_version=0,
            )
            for number, text in enumerate(responses)
        ),
    )


def test_quick_rules_run_here_and_the_rest_in_workers(start: Any, path: str) -> None:
    assert {"exact_match", "gsm8k"} <= set(REWARDS.stating("quick"))
    assert isinstance(start({"name": "gsm8k"}, {"name": "length"}), ScorerHere)
    assert isinstance(start({"name": "exact_match"}, {"name": "compute_score", "path": path}), ScorerInWorkers)


def test_a_worker_gives_what_the_function_itself_gives(start: Any, path: str) -> None:
    terms: tuple[dict[str, Any], ...] = (
        {"name": "compute_score", "path": path, "weight": 0.5},
        {"name": "exact_match", "data_sources": ["t"]},
        {"name": "exact_match", "options": {"extract": "all"}, "weight": -1.0},
    )
    groups = [group("a", "12", "it is 12", "13"), group("b", "", "12", source="u")]
    here = ScorerHere(load_rewards(RewardConfig(terms=list(terms))))
    # 0.5 x 1 + 1 - 1; of the first group's second response: 0 + 1 - 0
    assert [outcome.value for outcome in here.score(groups)[0] if isinstance(outcome, Reward)] == [0.5, 1.0, 0.0]
    scorer = start(*terms, workers=2)
    scorer.begin(groups[1])
    assert scorer.score(groups) == here.score(groups)


def test_a_group_is_scored_while_others_are_still_to_come(start: Any, path: str) -> None:
    scorer = start({"name": "compute_score", "path": path})
    early, late = group("a", "waits", "12"), group("b", "12")
    scorer.begin(early)  # were this to wait for the score, "go on" would come too late for it
    began = Path(path).with_name("began")
    while not began.exists():
        time.sleep(0.01)
    Path(path).with_name("go on").touch()
    first, second = scorer.score([early, late])
    assert [outcome.value for outcome in (*first, *second)] == [1.0, 1.0, 1.0]


def test_groups_that_are_not_wanted_in_the_end_are_forgotten(start: Any, path: str) -> None:
    scorer = start({"name": "compute_score", "path": path})
    for name in "abc":
        scorer.begin(group(name, "12"))
    kept = group("d", "13")
    scorer.begin(kept)
    assert [outcome.value for outcome in scorer.score([kept])[0]] == [0.0]
    assert scorer._begun == {}


def test_the_first_term_that_counts_is_named_when_the_worker_fails(start: Any, path: str) -> None:
    scorer = start(
        {"name": "exact_match", "data_sources": ["u"]},
        {"name": "compute_score", "path": path},
    )
    [[crashed, fine]] = scorer.score([group("a", "crash", "12")])
    assert crashed == Invalid("crashed", "the process ended with exit code 1")
    assert isinstance(fine, Reward)


# ----------------------------------------------------------------------------------------------------- batched terms


def test_a_batched_function_gets_all_responses_of_a_step_at_once(start: Any, path: str) -> None:
    scorer = start(
        {"name": "lengths", "path": path, "batched": True, "options": {"factor": 2}},
        {"name": "with_extras", "path": path, "batched": True, "weight": 10.0, "data_sources": ["t"]},
        {"name": "exact_match"},
    )
    groups = [group("a", "12", "x"), group("b", "yyy", source="u"), group("c", "12")]
    # 2 x length + 10 x number of the response among those of t + exact match
    expected = [[4 + 0 + 1, 2 + 10 + 0], [6 + 0], [4 + 20 + 1]]
    outcomes = scorer.score(groups)
    assert [[outcome.value for outcome in each] for each in outcomes] == expected
    assert outcomes[2][0].terms == (
        ("lengths", 4.0),
        ("with_extras", 2.0),
        ("with_extras/first", 0.0),
        ("exact_match", 1.0),
    )


def test_the_same_prompt_twice_in_a_step(start: Any, path: str) -> None:
    """A dataset that is smaller than a step brings a prompt again, with the same sample ids."""
    scorer = start({"name": "lengths", "path": path, "batched": True})
    first, second = scorer.score([group("a", "x", "yy"), group("a", "zzz")])
    assert [outcome.value for outcome in (*first, *second)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("responses", "reason", "detail"),
    [
        (("fewer", "x"), "wrong_length", "returned 1 values for 2 responses"),
        (("none", "x"), "wrong_length", "returned None; a list of 2 is expected"),
        (("raise", "x"), "exception", "mine.py:22: KeyError: 'oops'"),
        (("hang", "x"), "timeout", "no answer within 0.5 s"),
        (("end", "x"), "crashed", "the process ended with exit code 1"),
    ],
)
def test_a_batched_function_that_fails_and_is_not_asked_again_leaves_all_without_a_reward(
    start: Any, path: str, responses: tuple[str, str], reason: str, detail: str
) -> None:
    term = {"name": "lengths", "path": path, "batched": True, "halve_failed_batch": False}
    scorer = start(term, timeout_s=0.5)
    for outcome in scorer.score([group("a", *responses)])[0]:
        assert isinstance(outcome, Invalid)
        assert outcome.reason == reason and outcome.detail.endswith(detail)
        assert reason != "wrong_length" or outcome.detail.startswith(f"lengths: {path}:")
    assert [outcome.value for outcome in scorer.score([group("b", "x", "yy")])[0]] == [1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("culprits", "reason"),
    [
        ({5: "raise"}, "exception"),
        ({0: "end"}, "crashed"),
        ({7: "drop"}, "wrong_length"),
        ({3: "hang"}, "timeout"),
        ({0: "raise", 4: "raise", 10: "raise"}, "exception"),
    ],
)
def test_of_a_batch_that_fails_only_the_culprits_are_without_a_reward(
    start: Any, path: str, culprits: dict[int, str], reason: str
) -> None:
    scorer = start({"name": "lengths", "path": path, "batched": True}, timeout_s=0.3, workers=2)
    texts = [culprits.get(number, "y" * number) for number in range(11)]
    outcomes = [outcome for each in scorer.score([group("a", *texts[:4]), group("b", *texts[4:])]) for outcome in each]
    for number, outcome in enumerate(outcomes):
        if number in culprits:
            assert isinstance(outcome, Invalid) and outcome.reason == reason
        else:
            assert outcome == Reward(float(number), (("lengths", float(number)),))


def test_one_wrong_value_of_a_batch_is_one_response_without_a_reward(start: Any, path: str) -> None:
    config = RewardConfig(terms=[{"name": "lengths", "path": path, "batched": True}])
    for scorer in (start({"name": "lengths", "path": path, "batched": True}), ScorerHere(load_rewards(config))):
        first, second = scorer.score([group("a", "odd", "xx")])[0]
        assert first == Reward(2.0, (("lengths", 2.0),))
        assert isinstance(second, Invalid) and second.reason == "not_a_number"
        assert re.fullmatch(rf"lengths: {path}:\d+: returned the text 'a'; a number is expected", second.detail)


def test_a_failing_term_before_a_batched_one_decides(start: Any, path: str) -> None:
    scorer = start({"name": "compute_score", "path": path}, {"name": "lengths", "path": path, "batched": True})
    crashed, fine = scorer.score([group("a", "crash", "12")])[0]
    assert crashed == Invalid("crashed", "the process ended with exit code 1")
    assert isinstance(fine, Reward) and fine.value == 1.0 + 2.0


# --------------------------------------------------------------------------------------------------- what goes wrong


def test_problems_of_loading_are_those_of_all_terms_with_their_places(start: Any, path: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import json\n\njson.loads('')\ndef compute_score(**k): ...\n")
    with pytest.raises(ConfigError) as raised:
        start(
            {"name": "compute_score", "path": str(tmp_path / "broken.py")},
            {"name": "compute_scores", "path": path},
            {"name": "compute_score", "path": path, "batched": True},
        )
    problems = raised.value.problems
    assert [problem.field for problem in problems] == [
        "reward.terms.0.path",
        "reward.terms.1.name",
        "reward.terms.2.name",
    ]
    assert "broken.py:3: importing the file failed: json" in problems[0].what
    assert "did you mean compute_score?" in problems[1].fix
    assert "cannot be called with the keywords data_sources, solution_strs" in problems[2].what
    assert "batched: false" in problems[2].fix


def test_a_prompt_that_cannot_be_handed_over_is_without_a_reward(start: Any, path: str) -> None:
    scorer = start({"name": "compute_score", "path": path})
    odd = group("a", "12")
    odd.prompt.extra_info["object"] = object()  # type: ignore[index]
    assert scorer.score([odd]) == [(Invalid("exception", "a object cannot be handed to another process"),)]


def test_memory_of_a_function_in_this_process(path: str, tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("def compute_score(*_): raise MemoryError\n")
    terms = load_rewards(RewardConfig(terms=[{"name": "compute_score", "path": str(tmp_path / "large.py")}]))
    outcome = terms.score_response(group("a").prompt, "12")
    assert isinstance(outcome, Invalid) and outcome.reason == "memory" and "large.py:1: MemoryError" in outcome.detail


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not say how long a process waits"
)
def test_more_workers_than_cores_change_no_verdict(start: Any) -> None:
    """Three workers for each core, honest programs beside endless ones: each needs 0.5 s of a core, and a test may take 1 s. The
    time of a whole call is no part of it: other work on the machine counts there."""
    workers = 3 * len(os.sched_getaffinity(0))
    honest = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\nprint(input())"
    texts = [f"```python\n{source}\n```" for _ in range(workers) for source in (honest, "while True: pass")]
    options = {"timeout_s": 1.0, "time_limit_s": 1.5}
    scorer = start({"name": "code", "options": options}, workers=workers, timeout_s=60.0)
    programs = group("p", *texts)
    tested = replace(programs, prompt=replace(programs.prompt, ground_truth={"inputs": ["1"], "outputs": ["1"]}))
    [outcomes] = scorer.score([tested])
    assert [outcome.value if isinstance(outcome, Reward) else outcome for outcome in outcomes] == [1.0, 0.0] * workers


def test_a_group_that_was_begun_for_a_later_step_is_scored_once(start: Any, path: str) -> None:
    """Another step's score leaves it, and its own finds the answers by the object itself."""
    scorer = start({"name": "compute_score", "path": path})
    later, now, dropped = group("a", "12"), group("b", "13"), group("c", "12")
    for each in (later, dropped):
        scorer.begin(each, keep=True)
    asked = scorer._begun[id(later)][1]
    scorer.score([now])
    assert scorer._begun[id(later)][1] is asked
    assert [outcome.value for outcome in scorer.score([later])[0]] == [1.0]
    scorer.forget([dropped])
    assert scorer._begun == {} and scorer._kept == set()


def test_a_function_that_does_not_answer_in_time_is_named(start: Any, path: str) -> None:
    [[outcome]] = start({"name": "compute_score", "path": path}, timeout_s=0.3).score([group("a", "waits")])
    assert isinstance(outcome, Invalid) and outcome.reason == "timeout"
    assert outcome.detail == "compute_score: no answer within 0.3 s (reward.timeout_s)"
