"""``reward.overrun_is_zero``: an answer that computer algebra cannot finish is wrong; a machine that fails scores nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.reward import RewardConfig
from posttrain.processes.limits import CRASHED, MEMORY, TIMEOUT
from posttrain.processes.pool import CallFailure
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Outcome, Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.scorer import ScorerInWorkers, start_rewards

pytest.importorskip("math_verify")

pytestmark = pytest.mark.usefixtures("warm_children")

BOMB = "\\boxed{9^{9^{9^{9}}}}"
SLEEPS = """
import time
def hang(data_source, solution_str, ground_truth, extra_info):
    time.sleep(60 * (solution_str == "x"))
    return 0.5
"""


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[Any] = []

    def make(*terms: dict[str, Any], zero: bool = True) -> Any:
        config = RewardConfig(terms=list(terms), workers=1, timeout_s=1.5, overrun_is_zero=zero)
        started.append(start_rewards(config))
        return started[-1]

    yield make
    for scorer in started:
        scorer.close()


def group(*responses: str, truth: str = "72") -> TrajectoryGroup:
    trajectories = tuple(
        Trajectory(sample_id=f"a/{number}", token_ids=(1,), logprobs=(0.0,), text=text, stop_reason=StopReason.EOS,
                   policy_version=0)
        for number, text in enumerate(responses)
    )  # fmt: skip
    prompt = Prompt(prompt_id="a:0", token_ids=(1,), text="?", data_source="t", ground_truth=truth, extra_info={})
    return TrajectoryGroup(prompt=prompt, trajectories=trajectories)


def score(scorer: Any, *responses: str, truth: str = "72") -> list[Outcome]:
    [found] = scorer.score([group(*responses, truth=truth)])
    return list(found)


def value(outcome: Outcome) -> float:
    assert isinstance(outcome, Reward), outcome
    return outcome.value


@pytest.mark.slow
def test_a_bomb_is_wrong_and_its_neighbours_keep_their_scores(start: Any) -> None:
    scorer = start({"name": "math_verify"}, {"name": "length", "options": {"max_characters": 10}, "weight": 0.5})
    [alone] = score(start({"name": "length", "options": {"max_characters": 10}}), BOMB)
    assert isinstance(alone, Reward)
    bombed = group("\\boxed{72}", BOMB, "\\boxed{71}")
    scorer.begin(bombed)
    assert [future.result() for future in scorer.scorable(bombed)] == [True, True, True]
    right, bomb, wrong = scorer.score([bombed])[0]
    assert dict(right.terms)["math_verify"] == 1.0
    assert dict(wrong.terms)["math_verify"] == 0.0
    assert dict(bomb.terms) == {"math_verify": 0.0, "length": dict(alone.terms)["length"]}
    assert dict(bomb.texts)["math_verify/overrun"] == "no answer within 1.5 s"


@pytest.mark.slow
def test_without_the_option_a_bomb_is_invalid(start: Any) -> None:
    [bomb] = score(start({"name": "math_verify"}, zero=False), BOMB)
    assert isinstance(bomb, Invalid) and bomb.reason == TIMEOUT


@pytest.mark.slow
def test_a_reference_that_cannot_be_compared_is_nobodys_wrong_answer(start: Any) -> None:
    [outcome] = score(start({"name": "math_verify"}), "\\boxed{72}", truth="9^{9^{9^{9}}}")
    assert isinstance(outcome, Invalid) and outcome.reason == TIMEOUT


@pytest.mark.slow
def test_a_users_function_that_hangs_is_invalid(start: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLEEPS)
    mine = {"name": "hang", "path": str(tmp_path / "mine.py")}
    [outcome] = score(start(mine), "x")
    assert isinstance(outcome, Invalid) and outcome.reason == TIMEOUT
    hangs, bomb = score(start({"name": "math_verify"}, mine), "x", BOMB)
    assert isinstance(hangs, Invalid) and hangs.reason == TIMEOUT
    assert value(bomb) == 0.5


@pytest.mark.parametrize(("reason", "scored"), [(TIMEOUT, True), (MEMORY, True), (CRASHED, False)])
def test_which_failures_are_the_texts(start: Any, reason: str, scored: bool) -> None:
    """A worker that was killed, by whatever, is a failure of the machine."""
    scorer = start({"name": "math_rule", "options": {"part": "whole"}})
    assert isinstance(scorer, ScorerInWorkers)
    submit, asked = scorer._pool.submit_written, []

    def fail_first(calls: Any, seeds: Any, shared: str) -> Any:
        replies = submit(calls, seeds, shared)
        asked.extend(calls)
        if len(asked) > 1:
            return replies
        [_] = replies.all()
        failed: Any = type(replies)(1)
        failed.put(0, [CallFailure(reason, "said so")])
        return failed

    scorer._pool.submit_written = fail_first  # type: ignore[method-assign]
    [outcome] = score(scorer, "\\boxed{72}")
    assert isinstance(outcome, Reward) is scored
    assert len(asked) == 1 + scored
