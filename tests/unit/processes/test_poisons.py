"""Reward functions that do their worst, among ones that do not."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from posttrain.config.reward import RewardConfig
from posttrain.processes import proc
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Outcome, Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.scorer import ScorerInWorkers

TIMEOUT_S = 1.0
MARGIN_S = 10.0  # of a busy machine
WORKERS = 2
MARK = "POSTTRAIN_TEST_OF_POISONS"
CONFIG = {
    "terms": [{"name": "compute_score", "path": str(Path(__file__).with_name("poisons.py"))}],
    "workers": WORKERS,
    "timeout_s": TIMEOUT_S,
    "memory_gib": 0.1,
}

# What each gives: a reason, or the score of those whose only fault is what they leave behind.
TAKES_ALL_ITS_TIME = {
    "endless_loop": "timeout",
    "big_integer": "timeout",
    "slow_pattern": "timeout",
    "sleeps": "timeout",
    "blocks_signals": "timeout",
}
OTHERS = {
    "memory_bomb": "memory",
    "shared_memory_bomb": "memory",
    "fork_bomb": "process_limit",
    "fork_bomb_of_sessions": "process_limit",
    "much_output": "output_limit",
    "large_answer": "output_limit",
    "leaves": "crashed",
    "segmentation_fault": "crashed",
    "kills_its_parent": "crashed",
    "closes_everything": "crashed",
    "interrupts": "exception",
    "many_files": "exception",
    "double_fork": 1.0,
    "leaves_a_thread": 1.0,
    "sets_an_alarm": 1.0,
    "child_comes_back": 1.0,
    "child_raises": 1.0,
}
EXPECTED = TAKES_ALL_ITS_TIME | OTHERS
# Those that the sweep draws from, in turn.
IN_TURN = (
    *(
        "endless_loop",
        "fork_bomb",
        "big_integer",
        "memory_bomb",
        "double_fork",
        "slow_pattern",
        "much_output",
        "leaves",
    ),
    *("segmentation_fault", "sleeps", "blocks_signals"),
)


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """What every process that the tests start carries in its environment."""
    value = os.environ[MARK] = uuid.uuid4().hex
    yield value
    del os.environ[MARK]


@pytest.fixture(scope="module")
def scorer(mark: str) -> Iterator[ScorerInWorkers]:
    scorer = ScorerInWorkers(RewardConfig(**CONFIG))
    yield scorer
    scorer.close()
    assert list(proc.marked(MARK, mark)) == []


def group(name: str, responses: Sequence[str]) -> TrajectoryGroup:
    return TrajectoryGroup(
        prompt=Prompt(prompt_id=name, token_ids=(1,), text="?", data_source="t", ground_truth="yes"),
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


def good(number: int) -> tuple[str, Outcome]:
    right = number % 3 == 0
    text = "yes" if right else "no" * number
    value = float(right)
    return f"good {text}", Reward(value, (("compute_score", value), ("compute_score/length", float(len(text)))))


def check(outcome: Outcome, kind: str) -> None:
    expected = EXPECTED[kind]
    if isinstance(expected, str):
        assert isinstance(outcome, Invalid) and outcome.reason == expected, (kind, outcome)
        assert outcome.detail
    else:
        assert isinstance(outcome, Reward) and outcome.value == expected, (kind, outcome)


def held_bytes() -> int:
    return proc.usage([os.getpid()]).memory_bytes


def left(mark: str) -> int:
    """Processes that are alive besides keepers and workers; waits until those that were just killed are gone."""
    for _ in range(200):
        count = proc.usage(proc.marked(MARK, mark)).processes
        if count <= 2 * WORKERS:
            return 0
        time.sleep(0.01)
    return count - 2 * WORKERS


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_poison_gets_its_reason_and_its_neighbours_their_scores(
    scorer: ScorerInWorkers, mark: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    neighbours = [good(number) for number in range(6)]
    texts = [text for text, _ in neighbours]
    start = time.monotonic()
    [outcomes] = scorer.score([group(kind, [*texts[:3], kind, *texts[3:]])])
    assert time.monotonic() - start < TIMEOUT_S + MARGIN_S
    assert [*outcomes[:3], *outcomes[4:]] == [outcome for _, outcome in neighbours]
    check(outcomes[3], kind)
    assert left(mark) == 0
    assert capfd.readouterr() == ("", "")


def sweep(scorer: ScorerInWorkers, mark: str, poisons: int, first: int) -> None:
    """64 responses in 8 groups, with so many poisons at places spread over them."""
    kinds = {(index * 64) // poisons + 3: IN_TURN[(first + index) % len(IN_TURN)] for index in range(poisons)}
    rows = [(kinds[place], None) if place in kinds else good(place) for place in range(64)]
    groups = [group(f"{poisons}.{number}", [text for text, _ in rows[number::8]]) for number in range(8)]
    before, files, start = held_bytes(), len(os.listdir("/proc/self/fd")), time.monotonic()
    for each in groups:
        scorer.begin(each)
    outcomes = scorer.score(groups)
    took = time.monotonic() - start
    for number, found in enumerate(outcomes):
        for (text, expected), outcome in zip(rows[number::8], found, strict=True):
            if expected is None:
                if not (
                    isinstance(outcome, Invalid) and outcome.reason == "timeout"
                ):  # on a busy machine, sooner than its own
                    check(outcome, text)
            else:
                assert outcome == expected
    assert took <= TIMEOUT_S * math.ceil(poisons / WORKERS) + MARGIN_S
    assert held_bytes() - before < 20 << 20
    assert len(os.listdir("/proc/self/fd")) <= files
    assert left(mark) == 0


@pytest.mark.slow
@pytest.mark.parametrize("poisons", [1, 2, 5, 8])
@pytest.mark.parametrize("first", range(0, len(IN_TURN), 3))
def test_several_poisons_among_64(scorer: ScorerInWorkers, mark: str, poisons: int, first: int) -> None:
    sweep(scorer, mark, poisons, first)


def test_a_crash_shows_what_was_printed_and_where(scorer: ScorerInWorkers) -> None:
    [(fault, end)] = scorer.score([group("a", ["segmentation_fault", "leaves"])])
    assert isinstance(fault, Invalid) and isinstance(end, Invalid)
    assert fault.detail.startswith(
        "the process was ended by SIGSEGV; it printed: Fatal Python error: Segmentation fault"
    )
    assert "in segmentation_fault" in fault.detail
    assert end.detail == "the process ended with exit code 3; it printed: scoring leaves"


def test_results_do_not_depend_on_the_number_of_workers_or_on_the_run(mark: str, scorer: ScorerInWorkers) -> None:
    """Also where a function draws random numbers: they hang on the sample alone."""
    groups = [
        group(name, ["random_number", *(text for text, _ in map(good, range(5))), "random_number"]) for name in "abc"
    ]
    alone = ScorerInWorkers(RewardConfig(**{**CONFIG, "workers": 1}))
    several = ScorerInWorkers(RewardConfig(**{**CONFIG, "workers": 3}))
    try:
        expected = scorer.score(groups)
        assert scorer.score(groups) == alone.score(groups) == several.score(groups) == expected
        drawn = [outcome.value for outcomes in expected for outcome in outcomes[::6] if isinstance(outcome, Reward)]
        assert len(set(drawn)) == 6
        for each in reversed(groups):  # groups that end in another order
            scorer.begin(each)
        assert scorer.score(groups) == expected
    finally:
        alone.close()
        several.close()


def test_closing_in_the_middle_of_a_call_leaves_nothing(mark: str) -> None:
    scorer = ScorerInWorkers(RewardConfig(**{**CONFIG, "timeout_s": 60.0}))
    scorer.begin(group("a", ["sleeps", "double_fork", "sleeps", "good yes"]))
    time.sleep(0.2)
    start = time.monotonic()
    scorer.close()
    assert time.monotonic() - start < 30  # the call itself has 60
