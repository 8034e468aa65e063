"""Masks and advantages as spans give a step the numbers of plain tensors, to the bit: every estimator, episodes, filters, KL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.records.batches import ScoredBatch, TrainBatch, TrainerLogprobs
from posttrain.records.joined import joined
from posttrain.records.plans import AdvantagePlan, KlRewardPlan, RewardPlan
from posttrain.records.prompts import Prompt
from posttrain.records.span_tensors import SpanTensor, at_places, first_places, row_counts
from posttrain.records.trajectories import (
    Invalid,
    Outcome,
    Reward,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from posttrain.registry import ADVANTAGES
from posttrain.steps.advantage import estimate_advantages, estimator_inputs
from posttrain.steps.assemble import assemble
from posttrain.steps.measure import advantage_metrics
from posttrain.steps.shape_rewards import RewardState, shape_rewards

SETTINGS: dict[str, dict[str, Any]] = {"gae": {"gamma": 0.9, "gae_lambda": 0.8}}
PER_RESPONSE = sorted(name for name in ADVANTAGES.names() if ADVANTAGES.facts(name).per_response)


def response(name: str, mask: tuple[bool, ...], stop: StopReason = StopReason.EOS, **more: Any) -> Trajectory:
    count = len(mask)
    turns: list[Turn] = []
    for place in range(count):
        if mask[place] and (place == 0 or not mask[place - 1]):
            end = next((at for at in range(place, count) if not mask[at]), count)
            turns.append(Turn(start=place, end=end, text="", reward=0.25, stop_reason=stop, policy_version=0))
    return Trajectory(
        sample_id=name,
        token_ids=tuple(range(3, 3 + count)),
        logprobs=tuple(-0.1 * (1 + place) if own else 0.0 for place, own in enumerate(mask)),
        text="",
        stop_reason=stop,
        policy_version=0,
        response_mask=() if all(mask) else mask,
        turns=() if all(mask) else tuple(turns),
        **more,
    )


def group(name: str, trajectories: list[Trajectory], outcomes: list[Outcome], kept: bool = True) -> ScoredGroup:
    prompt = Prompt(prompt_id=name, token_ids=(1, 2), text="q", data_source="t")
    return ScoredGroup(
        group=TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories)), outcomes=tuple(outcomes), kept=kept
    )


def reward(value: float) -> Reward:
    return Reward(value, (("score", value), ("form", value * value)))


def single_turns() -> list[ScoredGroup]:
    """A truncated response, an invalid one, one without a token, and a group that a filter has taken out of the loss."""
    lengths = [(4, 1, 0), (2, 5, 3), (3, 3, 1)]
    outcomes: list[list[Outcome]] = [
        [reward(1.0), reward(0.3), reward(0.1)],
        [reward(-1.0), Invalid("exception"), reward(0.7)],
        [reward(0.9), reward(0.2), reward(0.2)],
    ]
    return [
        group(
            f"{number}",
            [
                response(f"{number}/{i}", (True,) * n, StopReason.LENGTH if n == 5 else StopReason.EOS)
                for i, n in enumerate(own)
            ],
            given,
            kept=number != 2,
        )
        for number, (own, given) in enumerate(zip(lengths, outcomes, strict=True))
    ]


def episodes() -> list[ScoredGroup]:
    """Turns with observations between them; one response was edited, and is two rows."""
    earlier = response("a/0", (True, False, True, True))
    first = [
        response("a/0", (True, True, False, False, True), earlier=(earlier,)),
        response("a/1", (True, False, True)),
        response("a/2", (True,)),
    ]
    second = [response("b/0", (True, True)), response("b/1", (True, False, False, True, True, True))]
    return [
        group("a", first, [reward(1.0), reward(0.25), reward(0.5)]),
        group("b", second, [reward(0.1), reward(0.6)]),
    ]


def with_plain_mask(batch: ScoredBatch) -> ScoredBatch:
    return replace(batch, sequences=replace(batch.sequences, response_mask=batch.sequences.response_mask.clone()))


def random_like(mask: Tensor, seed: int) -> Tensor:
    return torch.where(mask, -torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)), 0.0)


def learned_from(
    batch: ScoredBatch, name: str, rewards: RewardPlan, *, rejected: bool = False, **plan: Any
) -> TrainBatch:
    mask = batch.sequences.response_mask.clone()
    old, ref, values = (random_like(mask, seed) for seed in range(3))
    logprobs = TrainerLogprobs(
        old=old, ref=ref, rejected=mask & (torch.arange(mask.shape[1]) == 1) if rejected else None
    )
    shaped = shape_rewards(batch, logprobs, rewards, RewardState(rewards.kl))
    extras: Mapping[str, Tensor] = {
        "greedy_rewards": torch.linspace(-1, 1, len(mask)),
        "sum_pi_squared": random_like(mask, 7).abs(),
        "process_rewards": random_like(mask, 8),
        "state_index": torch.arange(len(mask)) % 2,
    }
    shaped = replace(shaped, scored=replace(shaped.scored, extras=extras))
    return estimate_advantages(shaped, values, AdvantagePlan(name=name, parameters=SETTINGS.get(name, {}), **plan))


def bits(tensor: Tensor) -> bytes:
    return tensor.clone().numpy().tobytes()


def assert_same(found: TrainBatch, expected: TrainBatch) -> None:
    for name in ("advantages", "loss_mask", "scores"):
        assert bits(getattr(found, name)) == bits(getattr(expected, name)), name
    assert found.counts() == expected.counts()
    assert advantage_metrics(found) == advantage_metrics(expected)
    rows = [4, 0, 2]
    part, plain = found.rows(rows), expected.rows(rows)
    assert bits(part.advantages) == bits(plain.advantages) and part.counts() == plain.counts()
    at = first_places(found.sequences.response_mask)
    assert torch.equal(at, first_places(expected.sequences.response_mask))
    assert bits(at_places(found.advantages, at)) == bits(at_places(expected.advantages, at))


@pytest.mark.parametrize("name", ADVANTAGES.names())
@pytest.mark.parametrize("groups", [single_turns, episodes])
def test_every_estimator(name: str, groups: Any) -> None:
    if "step_rewards" in ADVANTAGES.inputs(name):
        groups = episodes  # whose turns have rewards
    batch = assemble(groups())
    assert isinstance(batch.sequences.response_mask, SpanTensor)
    found = learned_from(batch, name, RewardPlan())
    expected = learned_from(with_plain_mask(batch), name, RewardPlan())
    assert isinstance(found.loss_mask, SpanTensor) and not isinstance(expected.loss_mask, SpanTensor)
    assert isinstance(found.advantages, SpanTensor) == (name in PER_RESPONSE)
    assert_same(found, expected)


@pytest.mark.parametrize("groups", [single_turns, episodes])
@pytest.mark.parametrize(
    ("rewards", "plan"),
    [
        (RewardPlan(normalize_mean="group", normalize_std="batch", clip=0.5), {}),
        (RewardPlan(kl=KlRewardPlan(coef=0.1)), {}),
        (RewardPlan(), {"whiten": True}),
        (RewardPlan(), {"clip": 0.4}),
        (RewardPlan(), {"rejected": True}),
        (RewardPlan(kl=KlRewardPlan(coef=0.1)), {"rejected": True, "whiten": True, "clip": 0.4}),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "opo", "gae", "reinforce_plus_plus"])
def test_shaped_rewards_whitening_clips_and_rejected_tokens(
    name: str, rewards: RewardPlan, plan: dict[str, Any], groups: Any
) -> None:
    batch = assemble(groups())
    assert_same(learned_from(batch, name, rewards, **plan), learned_from(with_plain_mask(batch), name, rewards, **plan))


@pytest.mark.parametrize(
    ("rules", "out"),
    [
        ({"mask_truncated": True}, {4}),  # of 5 tokens, and invalid besides
        ({"mask_long_wrong_tokens": 2}, {3, 4}),  # row 3 has 2 tokens and a reward of -1
    ],
)
def test_responses_that_are_left_out_for_their_length(rules: dict[str, Any], out: set[int]) -> None:
    batch = assemble(single_turns(), **rules)
    found = learned_from(batch, "grpo", RewardPlan())
    assert_same(found, learned_from(with_plain_mask(batch), "grpo", RewardPlan()))
    # Row 2 has no token, 6 to 8 are the filter's
    assert set((row_counts(found.loss_mask) == 0).nonzero()[:, 0].tolist()) == out | {2, 6, 7, 8}


@pytest.mark.parametrize("name", PER_RESPONSE)
@pytest.mark.parametrize("groups", [single_turns, episodes])
def test_one_number_per_response_is_what_the_tokens_of_joined_trajectories_give(name: str, groups: Any) -> None:
    """The estimator on trajectories that are joined token by token, and put back into their rows."""
    batch = with_plain_mask(assemble(groups()))
    shaped = shape_rewards(batch, TrainerLogprobs(), RewardPlan(), RewardState(KlRewardPlan(coef=0.0)))
    plan = AdvantagePlan(name=name)
    whole, available = joined(batch.sequences), estimator_inputs(shaped, None, plan)
    inputs = [whole.join_all(available[each]) for each in ADVANTAGES.inputs(name)]
    expected = whole.split(ADVANTAGES.get(name)(*inputs))
    found = estimate_advantages(
        shape_rewards(assemble(groups()), TrainerLogprobs(), RewardPlan(), RewardState(KlRewardPlan(coef=0.0))),
        None,
        plan,
    )
    assert bits(found.advantages) == bits(expected)
