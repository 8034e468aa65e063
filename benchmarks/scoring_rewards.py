"""How many mathematical answers per second the rules score, next to calling math-verify in a loop.

    python benchmarks/scoring_rewards.py [--answers 10000] [--rounds 3]

The answers are seeded: a few hundred characters of reasoning, then a boxed number, fraction, root, tuple or polynomial; half
are right, and a part of the right ones is written in another way (0.5 for a half). One process, one thread, but for the
last rows, which are scored in workers: exact_match does nearly nothing there, so its row is what a worker costs. The
median of the rounds. "right" is what each rule found right: they differ in which ways of writing they see through.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Callable
from importlib.metadata import version

from common import median, print_table

from posttrain.config.reward import RewardConfig
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.built_in import built_in
from posttrain.rewards.scorer import ScorerInWorkers

LOOP = "math-verify's parse and verify in a loop"
WORDS = "so we get the sum of both sides and then divide by x which gives with the first step that follows"


def answer(draw: random.Random) -> tuple[str, str]:
    """A reference and another way of writing it."""
    a, b, c = (draw.randint(2, 99) for _ in range(3))
    return draw.choice(
        [
            (str(a * b), f"{a * b}.0"),
            (f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}"),
            (f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{b}}} \\cdot {a}"),
            (f"({a}, {b})", f"\\left({a},{b}\\right)"),
            (f"{a}x^2+{b}x+{c}", f"{c}+{b}x+{a}x^{{2}}"),
            (f"-{a * 1000}", f"-{a},000"),
        ]
    )


def make(count: int) -> list[tuple[Prompt, str]]:
    draw = random.Random(0)
    pairs = []
    for index in range(count):
        reference, other = answer(draw)
        given = draw.choice([reference, other]) if index % 2 else answer(draw)[0]
        text = " ".join(draw.choices(WORDS.split(), k=draw.randint(40, 120)))
        prompt = Prompt(
            prompt_id=str(index), token_ids=(1,), text="?", data_source="t", ground_truth=reference, extra_info={}
        )
        pairs.append((prompt, f"{text}. Answer: $\\boxed{{{given}}}$"))
    return pairs


def by_rule(name: str) -> Callable[[Prompt, str], bool]:
    reward = built_in(name, {})

    def right(prompt: Prompt, response: str) -> bool:
        result = reward(prompt, response)
        return (result if isinstance(result, float) else result["score"]) > 0.5  # type: ignore[index, operator]

    return right


def as_group(prompt: Prompt, response: str) -> TrajectoryGroup:
    return TrajectoryGroup(
        prompt=prompt,
        trajectories=(
            Trajectory(
                sample_id=f"{prompt.prompt_id}/0",
                token_ids=(1,),
                logprobs=(0.0,),
                text=response,
                stop_reason=StopReason.EOS,
                policy_version=0,
            ),
        ),
    )


def in_a_loop(prompt: Prompt, response: str) -> bool:
    """What math-verify's own page shows, time limits as they are."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${prompt.ground_truth}$"), parse(response)))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--answers", type=int, default=10_000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--workers", type=int, default=2)
    given = arguments.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    pairs = make(given.answers)
    scorers = [
        *((name, by_rule(name)) for name in ("math", "math_dapo", "prime_math", "geo3k", "math_verify")),
        (LOOP, in_a_loop),
    ]
    seconds: dict[str, float] = {}
    found: dict[str, int] = {}
    for name, scorer in scorers:
        scorer(*pairs[0])  # imports
        seconds[name], found[name] = timed(
            lambda scorer=scorer: sum(scorer(prompt, response) for prompt, response in pairs), given.rounds
        )
    groups = [as_group(prompt, response) for prompt, response in pairs]
    for rule in ("exact_match", "math_verify"):
        name = f"{rule}, in {given.workers} workers"
        pool = ScorerInWorkers(RewardConfig(terms=[{"name": rule}], workers=given.workers))
        pool.score(groups[: 8 * given.workers])  # imports
        seconds[name], found[name] = timed(lambda pool=pool: count_right(pool, groups), given.rounds)
        pool.close()
    rows = [
        (name, f"{given.answers / took:,.0f}", f"{seconds[LOOP] / took:,.1f}", f"{took:.2f}", f"{found[name]:,}")
        for name, took in seconds.items()
    ]
    print(f"math-verify {version('math-verify')}")
    print_table(["rule", "answers/s", "times as fast as the loop", f"{given.answers:,} answers, s", "right"], rows)


def timed(score_all: Callable[[], int], rounds: int) -> tuple[float, int]:
    """The median of the seconds, and how many were right."""
    times, right = [], 0
    for _ in range(rounds):
        start = time.perf_counter()
        right = score_all()
        times.append(time.perf_counter() - start)
    return median(times), right


def count_right(scorer: ScorerInWorkers, groups: list[TrajectoryGroup]) -> int:
    outcomes = [outcome for (outcome,) in scorer.score(groups)]
    return sum(isinstance(outcome, Reward) and outcome.value > 0.5 for outcome in outcomes)


if __name__ == "__main__":
    main()
