"""The numbers and the samples of a step."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import advantages_of, train_batch
from posttrain.records.batches import CriticTargets
from posttrain.records.plans import AdvantagePlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import (
    Invalid,
    Outcome,
    Reward,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from posttrain.run.samples import write_samples
from posttrain.steps.assemble import assemble
from posttrain.steps.measure import (
    advantage_metrics,
    critic_metrics,
    gap_metrics,
    length_metrics,
    reward_metrics,
    staleness_metrics,
)
from posttrain.steps.validate import answer_of, prompt_metrics, validation_metrics


def make_scored(
    outcomes: list[Outcome], lengths: list[int], name: str = "a", source: str = "sums", **prompt: Any
) -> ScoredGroup:
    stops = [StopReason.LENGTH if length >= 4 else StopReason.EOS for length in lengths]
    group = TrajectoryGroup(
        prompt=Prompt(**{"prompt_id": name, "token_ids": (1, 2), "text": "q", "data_source": source, **prompt}),
        trajectories=tuple(
            Trajectory(
                sample_id=f"{name}/{number}",
                token_ids=(7,) * length,
                logprobs=(-1.0,) * length,
                text="r",
                stop_reason=stop,
                policy_version=3,
            )
            for number, (length, stop) in enumerate(zip(lengths, stops, strict=True))
        ),
    )
    return ScoredGroup(group=group, outcomes=tuple(outcomes))


GROUPS = [
    make_scored([Reward(1.0, (("x", 1.0),)), Reward(0.0, (("x", 0.0),)), Invalid("exception", "boom")], [1, 2, 4]),
    make_scored([Reward(2.0, (("x", 5.0),))] * 2 + [Invalid("not_finite")], [3, 3, 5], name="b"),
]


def test_reward_metrics_by_hand() -> None:
    metrics = reward_metrics(GROUPS)
    assert metrics == pytest.approx(
        {
            "reward/mean": 5 / 4,  # 1, 0, 2, 2
            "reward/std": math.sqrt((1 + 0 + 4 + 4) / 4 - 25 / 16),
            "reward/min": 0.0,
            "reward/max": 2.0,
            "reward/term/x": 11 / 4,
            "reward/invalid_share": 2 / 6,
            "reward/invalid/exception": 1 / 6,
            "reward/invalid/not_finite": 1 / 6,
            "group/no_signal_share": 1 / 2,  # the second group's rewards are equal
        }
    )


def test_step_without_a_valid_reward_has_no_mean_reward() -> None:
    metrics = reward_metrics([make_scored([Invalid("exception")] * 2, [1, 1])])
    assert metrics == {"reward/invalid_share": 1.0, "reward/invalid/exception": 1.0, "group/no_signal_share": 1.0}


def test_length_metrics_by_hand() -> None:
    metrics = length_metrics(GROUPS)
    assert metrics["response/length_mean"] == 18 / 6
    assert (metrics["response/length_min"], metrics["response/length_max"]) == (1, 5)
    assert metrics["response/length_std"] == pytest.approx(math.sqrt(10 / 6))  # 1, 2, 4, 3, 3, 5 around 3
    assert metrics["response/truncated_share"] == 2 / 6
    assert metrics["prompt/length_mean"] == metrics["prompt/length_min"] == metrics["prompt/length_max"] == 2
    assert (metrics["step/prompts"], metrics["step/sequences"], metrics["step/response_tokens"]) == (2, 6, 18)


def test_prompts_that_read_the_same_are_counted_once() -> None:
    def prompts(*given: tuple[str, tuple[int, ...]]) -> float:
        groups = [make_scored([Reward(0.0)], [1], name=name, token_ids=ids) for name, ids in given]
        return length_metrics(groups)["prompt/distinct_share"]

    assert prompts(("a", (1, 2)), ("b", (1, 3))) == 1
    assert prompts(("a", (1, 2)), ("b", (1, 2)), ("c", (1, 2)), ("d", (1, 4))) == 2 / 4
    assert prompts(("a", (1, 2)), ("a", (1, 2))) == 1  # one group that a filter has copied


def test_staleness_is_counted_in_updates() -> None:
    """GROUPS were sampled at version 3."""
    newer = make_scored([Reward(0.0)], [1])
    newer = replace(
        newer, group=replace(newer.group, trajectories=(replace(newer.group.trajectories[0], policy_version=5),))
    )
    assert staleness_metrics([*GROUPS, newer], 5) == {
        "rollout/staleness_mean": 6 * 2 / 7,  # six of them are 2 behind, one is not
        "rollout/staleness_max": 2.0,
    }


def test_staleness_is_counted_from_the_oldest_token() -> None:
    """Tokens from 2 on are of version 5; the one before, and an earlier sample, decide."""
    (group,) = [make_scored([Reward(0.0)], [3])]
    (sampled,) = group.group.trajectories
    spans = (VersionSpan(0, 4), VersionSpan(2, 5))

    def staleness(**changes: Any) -> float:
        found = replace(group.group, trajectories=(replace(sampled, policy_version=5, **changes),))
        return staleness_metrics([replace(group, group=found)], 6)["rollout/staleness_max"]

    assert (staleness(), staleness(version_spans=spans)) == (1.0, 2.0)
    assert staleness(version_spans=spans, earlier=(sampled,)) == 3.0  # GROUPS are of version 3


def test_gap_is_over_response_tokens_only() -> None:
    rollout = torch.tensor([[-1.0, -2.0, math.nan]])
    trainer = torch.tensor([[-1.05, -2.15, 0.0]])
    metrics = gap_metrics(rollout, trainer, torch.tensor([[True, True, False]]))
    assert metrics == pytest.approx({"gap/mean": 0.1, "gap/max": 0.15, "gap/share_above": 0.5}, abs=1e-6)


def test_advantage_metrics_are_over_loss_tokens() -> None:
    """Rewards 1 and 0 on 1 and 2 tokens, advantages +-0.70711; the invalid response's 4 tokens do not count."""
    train = advantages_of(assemble(GROUPS[:1]), AdvantagePlan(name="grpo"))
    metrics = advantage_metrics(train)
    expected = {"mean": -0.70711 / 3, "abs_mean": 0.70711, "max": 0.70711, "min": -0.70711}
    assert metrics == pytest.approx({f"advantage/{name}": value for name, value in expected.items()}, abs=1e-4)
    nothing = advantages_of(assemble([make_scored([Invalid("exception")], [2])]), AdvantagePlan(name="grpo"))
    assert advantage_metrics(nothing) == {}


def test_validation_metrics_are_split_by_source() -> None:
    metrics = validation_metrics(
        [
            make_scored([Reward(1.0)], [2], source="sums"),
            make_scored([Invalid("exception")], [4], source="sums"),
            make_scored([Reward(0.5)], [3], source="words"),
        ]
    )
    assert metrics == {
        "validation/accuracy": 1 / 3,  # of the three questions, not the mean of 1/2 and 0
        "validation/sums/accuracy": 0.5,  # the one that could not be scored counts as wrong
        "validation/sums/reward_mean": 1.0,
        "validation/sums/length_mean": 3.0,
        "validation/sums/invalid_share": 0.5,
        "validation/sums/invalid/exception": 0.5,
        "validation/words/accuracy": 0.0,
        "validation/words/reward_mean": 0.5,
        "validation/words/length_mean": 3.0,
        "validation/words/invalid_share": 0.0,
    }


def test_several_samples_of_a_prompt_show_their_spread() -> None:
    """Of three answers, valid rewards a {0, 1}, b {2, 2}, c {1}, and means over the three prompts:

    mean 1/2, 2, 1; std 1/2, 0, 0; the best of two draws 3/4, 2, 1, of three 7/8, 2, 1; the worst 1/4, 2, 1 and 1/8, 2, 1.
    Right are 1, 2, 1 of 3: pass@2 = 1 - C(2,2)/C(3,2) = 2/3, 1, 2/3; pass@3 = 1.
    """
    lost = Invalid("exception")
    metrics = validation_metrics(
        [
            make_scored([Reward(0.0), Reward(1.0), lost], [2, 2, 2]),
            make_scored([Reward(2.0), Reward(2.0), lost], [2, 2, 2], name="b"),
            make_scored([Reward(1.0), lost, lost], [2, 2, 2], name="c"),
        ]
    )
    several = {name.removeprefix("validation/sums/"): value for name, value in metrics.items() if "@" in name}
    assert several == pytest.approx(
        {
            "pass@2": 7 / 9,
            "pass@3": 1.0,
            "reward_mean@3": 3.5 / 3,
            "reward_std@3": 0.5 / 3,
            "reward_best@2": 3.75 / 3,
            "reward_best@3": 3.875 / 3,
            "reward_worst@2": 3.25 / 3,
            "reward_worst@3": 3.125 / 3,
        }
    )
    assert metrics["validation/sums/accuracy"] == pytest.approx((1 + 2 + 1) / 9)
    assert metrics["validation/sums/invalid/exception"] == pytest.approx(4 / 9)


def test_answers_vote_where_every_reward_says_which_it_found() -> None:
    """Of "7", "7" and "8", worth 0, 0 and 1, the majority is worth 0 unless "8" is drawn often enough."""
    said = [
        Reward(0.0, (), (("a/note", "x"), ("a/pred", "7"))),
        Reward(0.0, (), (("a/pred", "7"),)),
        Reward(1.0, (), (("a/pred", "8"),)),
    ]
    metrics = prompt_metrics(said)
    # of three draws the 8 wins with two or three: 3 x (1/3)^2 x 2/3 + (1/3)^3 = 7/27 = 0.259
    assert metrics["reward_maj@3"] == pytest.approx(7 / 27, abs=0.04)
    assert "reward_maj@3" not in prompt_metrics([*said[:2], Reward(1.0)])
    assert answer_of(said[0]) == "7"
    assert answer_of(Reward(1.0)) is None and answer_of(Invalid("exception")) is None


# --------------------------------------------------------------------------------------------------------- samples


def written(path: Path, groups: list[ScoredGroup], **options: Any) -> list[dict[str, Any]]:
    write_samples(path, 5, groups, **options)
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def test_samples_of_a_training_step(tmp_path: Path) -> None:
    train = advantages_of(assemble(GROUPS), AdvantagePlan(name="grpo"))
    samples = written(tmp_path / "samples" / "step_5.jsonl", GROUPS, batch=train)
    assert len(samples) == 6
    assert samples[0] == {
        "step": 5,
        "sample_id": "a/0",
        "prompt_id": "a",
        "data_source": "sums",
        "prompt": "q",
        "response": "r",
        "ground_truth": None,
        "reward": 1.0,
        "reward_terms": {"x": 1.0},
        "reward_texts": {},
        "invalid": None,
        "advantage": pytest.approx(0.70711, abs=1e-4),
        "stop_reason": "eos",
        "policy_version": 3,
        "prompt_tokens": 2,
        "response_tokens": 1,
    }
    assert samples[2]["invalid"] == {"reason": "exception", "detail": "boom"}
    assert samples[2]["advantage"] is None and samples[2]["reward"] is None
    assert samples[3]["advantage"] == 0.0
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_5.jsonl"]  # nothing half-written beside


def test_validation_samples_have_no_advantage(tmp_path: Path) -> None:
    assert {sample["advantage"] for sample in written(tmp_path / "s.jsonl", GROUPS)} == {None}


@pytest.mark.parametrize("text", ["line\nbreak\u2028\u0000", "</script><b>", "𝄞 ü", 'quote " and \\ back'])
def test_any_text_stays_on_its_line_and_comes_back(tmp_path: Path, text: str) -> None:
    (sample,) = written(tmp_path / "s.jsonl", [make_scored([Reward(0.0)], [1], text=text, ground_truth=text)])
    assert sample["prompt"] == sample["ground_truth"] == text


def test_half_a_character_in_an_error_text_does_not_end_the_run(tmp_path: Path) -> None:
    (sample,) = written(tmp_path / "s.jsonl", [make_scored([Invalid("exception", "bad \ud800 text")], [1])])
    assert sample["invalid"]["detail"] == "bad \ud800 text"


@pytest.mark.parametrize(
    ("ground_truth", "expected"),
    [(math.nan, "nan"), ({"a": [1, None]}, {"a": [1, None]}), ({(1, 2): 3}, "{(1, 2): 3}"), (7, 7)],
)
def test_ground_truth_that_json_cannot_hold_is_written_as_text(
    tmp_path: Path, ground_truth: object, expected: object
) -> None:
    (sample,) = written(tmp_path / "s.jsonl", [make_scored([Reward(0.0)], [1], ground_truth=ground_truth)])
    assert sample["ground_truth"] == expected


def test_critic_metrics_by_hand() -> None:
    """Two loss tokens per row in two rows; the third row is invalid, and what stands there does not count."""
    batch = assemble([make_scored([Reward(1.0), Reward(0.0), Invalid("exception")], [2, 2, 2])])
    nan = float("nan")
    values = torch.tensor([[0.5, 1.5], [0.0, 0.0], [nan, nan]])
    returns = torch.tensor([[1.0, 2.0], [0.0, 1.0], [nan, 9.0]])
    mask = batch.sequences.response_mask & batch.valid[:, None]
    train = train_batch(batch.sequences, loss_mask=mask, values=values, returns=returns)
    # returns 1, 2, 0, 1: mean 1, variance 2 / 3; errors .5, .5, 0, 1: mean .5, variance (0 + 0 + .25 + .25) / 3
    assert critic_metrics(train) == pytest.approx(
        {"critic/values_mean": 0.5, "critic/returns_mean": 1.0, "critic/explained_variance": 1 - 0.5 / 2}
    )
    flat = replace(train, critic=CriticTargets(values=values, returns=torch.full((3, 2), 0.1)))
    assert set(critic_metrics(flat)) == {
        "critic/values_mean",
        "critic/returns_mean",
    }  # nothing varies: nothing to explain
    assert critic_metrics(replace(train, critic=None)) == {}
    assert critic_metrics(replace(train, loss_mask=torch.zeros_like(mask))) == {}


def test_no_gap_without_log_probs_of_the_trainer() -> None:
    assert gap_metrics(torch.zeros(1, 2), None, torch.ones(1, 2, dtype=torch.bool)) == {}
