"""Shares that follow success: by hand, within their bounds, carried exactly, and the same after a resume."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.config.curriculum import CurriculumConfig
from posttrain.data.curriculum import CurriculumLoader, bounded
from posttrain.errors import ConfigError
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


def prompts(**counts: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{name}:{number}", token_ids=(1,), text="", data_source=name)
        for name, count in counts.items()
        for number in range(count)
    ]


def group(source: str, *outcomes: Outcome, success: float | None = None) -> ScoredGroup:
    trajectories = tuple(
        Trajectory(
            sample_id=f"{source}/{number}",
            token_ids=(1,),
            logprobs=(0.0,),
            text="",
            stop_reason=StopReason.EOS,
            policy_version=0,
            env_metrics=() if success is None else (("success", success),),
        )
        for number in range(len(outcomes))
    )
    return ScoredGroup(
        group=TrajectoryGroup(prompt=prompts(**{source: 1})[0], trajectories=trajectories), outcomes=outcomes
    )


def loader(rows: list[Prompt], per_step: int, **settings: float) -> CurriculumLoader:
    return CurriculumLoader(rows, per_step, CurriculumConfig(**settings), seed=3, shuffle=True)  # type: ignore[arg-type]


def drawn(made: CurriculumLoader) -> dict[str, int]:
    return dict(Counter(prompt.data_source for prompt in made.next()))


def test_shares_by_hand() -> None:
    made = loader(prompts(easy=9, hard=9, right=9), 10, memory=0.5, least_share=0.1)
    assert drawn(made) == {
        "easy": 4,
        "hard": 3,
        "right": 3,
    }  # thirds of ten; the one that is left over goes to the first
    metrics = made.learned([
        group("easy", Reward(1.0), Reward(1.0), Reward(1.0), Reward(0.5)),  # 3/4: weight (1 - .75) / .5 = .5
        group("hard", Reward(0.0), Invalid("lost")),  # 0: the least share
        group("right", Reward(0.0), Reward(0.0), success=1.0),  # the environment says so: 1, weight 0
    ])  # fmt: skip
    # All of the weight is easy's: .8 of the step is left for it.
    assert {name: metrics[f"curriculum/{name}/share"] for name in ("easy", "hard", "right")} == pytest.approx({
        "easy": 0.8, "hard": 0.1, "right": 0.1,
    })  # fmt: skip
    assert metrics["curriculum/easy/success_rate"] == 0.75
    metrics = made.learned([group("right", Reward(0.0), Reward(1.0))])  # a rate of .5 in the step, half of it counts
    assert metrics["curriculum/right/success_rate"] == 0.75
    assert metrics["curriculum/right/share"] == metrics["curriculum/easy/share"] == pytest.approx(0.45)


def test_fractions_are_carried_and_a_resumed_run_draws_the_same() -> None:
    rows = prompts(a=7, b=5, c=11)
    made = loader(rows, 7, least_share=0.05)
    had, owed = Counter[str](), Counter[str]()
    seen = []
    for step in range(40):
        if step == 20:
            resumed = loader(rows, 7, least_share=0.05)
            resumed.restore(made.state())
            made = resumed
        owed.update({name: 7 * share for name, share in made.shares().items()})
        step_prompts = made.next()
        seen.append([prompt.prompt_id for prompt in step_prompts])
        had.update(prompt.data_source for prompt in step_prompts)
        assert len(step_prompts) == 7 and all(abs(had[name] - owed[name]) < 1 for name in "abc")
        made.learned([group(name, Reward(float((step + index) % 3 == 0))) for index, name in enumerate("abc")])
    whole = loader(rows, 7, least_share=0.05)
    for step in range(40):
        assert [prompt.prompt_id for prompt in whole.next()] == seen[step]
        whole.learned([group(name, Reward(float((step + index) % 3 == 0))) for index, name in enumerate("abc")])
    with pytest.raises(ConfigError, match="the sources a, b, c"):
        loader(prompts(a=7, b=5), 7).restore(made.state())


def test_bounds_that_leave_no_shares_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"least_share of 0.6 each do not add up"):
        loader(prompts(a=2, b=2), 2, least_share=0.6)
    with pytest.raises(ConfigError, match=r"most_share of 0.4 each do not add up"):
        loader(prompts(a=2, b=2), 2, most_share=0.4)


@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    least=st.floats(0, 1),
    most=st.floats(0, 1),
)
def test_shares_add_up_within_their_bounds(weights: list[float], least: float, most: float) -> None:
    count = len(weights)
    least, most = least / count, (1 + most * (count - 1)) / count
    shares = bounded({str(index): weight for index, weight in enumerate(weights)}, least, most)
    assert sum(shares.values()) == pytest.approx(1)
    assert all(least - 1e-9 <= share <= most + 1e-9 for share in shares.values())
