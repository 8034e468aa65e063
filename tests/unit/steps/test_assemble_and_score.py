"""From responses to one batch of tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batches import advantages_of
from posttrain.errors import RunStopped
from posttrain.records.plans import AdvantagePlan, LossPlan, UpdatePlan
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
from posttrain.steps.assemble import assemble
from posttrain.steps.rl_step import trainer_logprobs
from posttrain.steps.score import score


def make_group(name: str, prompt: tuple[int, ...], responses: list[tuple[int, ...]]) -> TrajectoryGroup:
    """Log-prob of the t-th token is -(t + 1)."""
    return TrajectoryGroup(
        prompt=Prompt(prompt_id=name, token_ids=prompt, text="", data_source="t"),
        trajectories=tuple(
            Trajectory(
                sample_id=f"{name}/{number}",
                token_ids=ids,
                logprobs=tuple(-float(t + 1) for t in range(len(ids))),
                text="",
                stop_reason=StopReason.EOS,
                policy_version=0,
            )
            for number, ids in enumerate(responses)
        ),
    )


GROUPS = [make_group("a", (1, 2, 3), [(10,), (11, 12, 13)]), make_group("b", (4,), [(14, 15), (16, 17)])]
OUTCOMES: list[tuple[Outcome, ...]] = [(Reward(1.0), Reward(0.0)), (Invalid("exception"), Reward(2.5))]
SCORED = [ScoredGroup(group=group, outcomes=outcomes) for group, outcomes in zip(GROUPS, OUTCOMES, strict=True)]


def test_prompts_are_right_aligned_and_responses_left_aligned() -> None:
    batch = assemble(SCORED).sequences
    assert batch.tokens.tolist() == [
        [1, 2, 3, 10, 0, 0],
        [1, 2, 3, 11, 12, 13],
        [0, 0, 4, 14, 15, 0],
        [0, 0, 4, 16, 17, 0],
    ]
    assert batch.prompt_width == 3
    assert batch.prompt_lengths.tolist() == [3, 3, 1, 1]
    assert batch.response_lengths.tolist() == [1, 3, 2, 2]
    assert batch.response_mask.tolist() == [
        [True, False, False],
        [True, True, True],
        [True, True, False],
        [True, True, False],
    ]
    assert batch.rollout_logprobs.tolist() == [[-1, 0, 0], [-1, -2, -3], [-1, -2, 0], [-1, -2, 0]]
    assert batch.group_index.tolist() == [0, 0, 1, 1]
    assert batch.sample_ids == ("a/0", "a/1", "b/0", "b/1")


def test_invalid_response_has_reward_0_and_leaves_the_loss() -> None:
    batch = assemble(SCORED)
    assert batch.rewards.tolist() == [1.0, 0.0, 0.0, 2.5]
    assert batch.valid.tolist() == [True, True, False, True]
    train = advantages_of(batch, AdvantagePlan(name="grpo"))
    assert train.loss_mask.sum(dim=1).tolist() == [1, 3, 0, 2]
    assert (train.counts().tokens, train.counts().sequences) == (6, 3)
    # Rewards 1 and 0: mean 0.5, sample std sqrt(0.5) = 0.7071, so +-0.7071; a lone valid response has no baseline: 0.
    assert train.advantages[:, 0].tolist() == pytest.approx([0.70711, -0.70711, 0.0, 0.0], abs=1e-4)


def test_a_step_without_a_token_is_a_batch_that_teaches_nothing() -> None:
    """Every episode has failed before its first token."""
    empty = [ScoredGroup(group=make_group("a", (1, 2), [(), ()]), outcomes=(Invalid("failed"), Invalid("failed")))]
    batch = assemble(empty)
    assert batch.sequences.response_lengths.tolist() == [0, 0] and not batch.sequences.last_tokens.any()
    train = advantages_of(batch, AdvantagePlan(name="grpo"))
    assert train.counts().tokens == 0 and not train.advantages.any()


def test_rows_of_a_batch_keep_their_order_and_their_names() -> None:
    train = advantages_of(assemble(SCORED), AdvantagePlan(name="grpo")).rows([3, 0])
    assert train.sequences.sample_ids == ("b/1", "a/0")
    assert train.scores.tolist() == [2.5, 1.0]
    assert train.loss_mask.sum(dim=1).tolist() == [2, 1]
    assert train.logprobs.old is None
    assert len(train) == 2


class Recorder:
    """Scores every token the same, and notes the temperature."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.temperatures: list[float] = []

    def logprobs(self, batch: object, temperature: float) -> torch.Tensor:
        self.temperatures.append(temperature)
        return torch.full((4, 3), self.value)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("with_reference", [True, False])
def test_logprobs_are_computed_when_needed_at_the_sampling_temperature(on_policy: bool, with_reference: bool) -> None:
    loss = LossPlan(name="ppo_clip", aggregation="token_mean", temperature=0.7)
    plan = UpdatePlan(loss=loss, epochs=1, sequences_per_update=4, on_policy=on_policy)
    policy, reference = Recorder(-1.0), Recorder(-2.0)
    logprobs = trainer_logprobs(assemble(SCORED).sequences, policy, reference if with_reference else None, plan)
    assert policy.temperatures == ([] if on_policy else [0.7])
    assert reference.temperatures == ([0.7] if with_reference else [])
    assert (logprobs.old is None) == on_policy
    assert (logprobs.ref is None) != with_reference


class Scripted:
    """A scorer that returns prepared outcomes."""

    def __init__(self, outcomes: list[tuple[Outcome, ...]]) -> None:
        self.left = list(outcomes)

    def score(self, groups: list[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        return [self.left.pop(0) for _ in groups]


def test_share_of_invalid_responses_up_to_the_limit_is_accepted() -> None:
    assert score(GROUPS, Scripted(OUTCOMES), max_invalid_share=0.25) == SCORED  # 1 of 4


def test_more_invalid_responses_than_allowed_stop_the_run_with_examples() -> None:
    failed: list[tuple[Outcome, ...]] = [(Invalid("not_finite", "score: returned nan"), Reward(0.0)), OUTCOMES[1]]
    with pytest.raises(RunStopped) as raised:
        score(GROUPS, Scripted(failed), max_invalid_share=0.25)
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        "2 of 4 responses have no valid reward, more than reward.max_invalid_share = 0.25 allows (not_finite 1, exception 1):"
    )
    assert lines[1:] == ["  a/0: not_finite: score: returned nan", "  b/0: exception: "]


def test_examples_are_of_every_reason() -> None:
    group = make_group("a", (1,), [(2,)] * 14)
    outcomes: tuple[Outcome, ...] = (
        *(Invalid("exception", str(n)) for n in range(12)),
        Invalid("timeout"),
        Invalid("memory"),
    )
    with pytest.raises(RunStopped) as raised:
        score([group], Scripted([outcomes]), max_invalid_share=0.5)
    lines = str(raised.value).splitlines()
    assert lines[0].endswith("(exception 12, timeout 1, memory 1):")
    assert lines[1:4] == ["  a/0: exception: 0", "  a/12: timeout: ", "  a/13: memory: "]
    assert len(lines) == 11 and lines[10] == "  a/7: exception: 7"


def test_a_failure_of_all_responses_is_one_example() -> None:
    failed: tuple[Outcome, ...] = (Invalid("not_a_number", "score: returned None"),) * 2
    with pytest.raises(RunStopped) as raised:
        score(GROUPS, Scripted([failed, failed]), max_invalid_share=0.5)
    assert str(raised.value).splitlines()[1:] == ["  a/0 and 3 more: not_a_number: score: returned None"]


def test_limit_of_0_accepts_a_step_without_failures() -> None:
    fine: list[tuple[Outcome, ...]] = [(Reward(0.0), Reward(0.0))] * 2
    assert len(score(GROUPS, Scripted(fine), max_invalid_share=0.0)) == 2


def test_scorer_that_forgets_a_response_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 outcomes for 2 responses"):
        score(GROUPS, Scripted([(Reward(1.0),), OUTCOMES[1]]))


def weighed(name: str, difficulty: object, *lengths: int, rewards: tuple[float, ...] = ()) -> ScoredGroup:
    made = make_group(name, (1,), [tuple(range(10, 10 + length)) for length in lengths])
    prompt = replace(made.prompt, extra_info={} if difficulty is None else {"difficulty": difficulty})
    outcomes = tuple(Reward(value) for value in rewards or (0.0,) * len(lengths))
    return ScoredGroup(group=replace(made, prompt=prompt), outcomes=outcomes)


def test_responses_weigh_by_difficulty_and_length() -> None:
    """0.5 + 1.5 d: 0.5, 0.5, 2 (1.7 is cut to 1), mean 1. Lengths 1, 3, 5: 1.5, 1, 0.5. Their product 0.75, 0.5, 1, times
    3 / 2.25."""
    groups = [weighed("a", 0.0, 1, 3), weighed("b", 1.7, 5)]
    by = lambda *names: assemble(groups, weigh_by=names).weights  # noqa: E731
    assert by("difficulty").tolist() == pytest.approx([0.5, 0.5, 2.0])
    assert by("length").tolist() == pytest.approx([1.5, 1.0, 0.5])
    assert by("difficulty", "length").tolist() == pytest.approx([1.0, 2 / 3, 4 / 3])
    assert assemble(groups).weights is None
    equal = assemble([weighed("a", None, 4, 4)], weigh_by=["length"]).weights
    assert equal is not None and equal.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("difficulty", [None, "hard", float("nan"), True])
def test_a_row_without_a_difficulty_stops_the_run(difficulty: object) -> None:
    with pytest.raises(RunStopped, match=r"for difficulty, and loss\.weigh_by asks"):
        assemble([weighed("a", difficulty, 2)], weigh_by=["difficulty"])


def test_long_wrong_responses_leave_the_loss() -> None:
    """3 tokens and more: the wrong one of 3 goes, the right one of 3 and the wrong one of 2 stay, and so do all rewards."""
    batch = assemble([weighed("a", None, 3, 3, 2, rewards=(0.0, 1.0, 0.0))], mask_long_wrong_tokens=3)
    assert batch.trained.tolist() == [False, True, True]
    assert batch.rewards.tolist() == [0.0, 1.0, 0.0]
