"""Dynamic sampling: which groups make up a step, batch by batch."""

from __future__ import annotations

import pytest

from posttrain.errors import RunStopped
from posttrain.records.plans import GroupFilterPlan
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
from posttrain.steps.select import Selection


def group(name: str, *outcomes: Outcome | float) -> ScoredGroup:
    """Responses of two tokens each."""
    trajectories = tuple(
        Trajectory(
            sample_id=f"{name}/{number}",
            token_ids=(5, 6),
            logprobs=(-1.0, -1.0),
            text="",
            stop_reason=StopReason.EOS,
            policy_version=0,
        )
        for number in range(len(outcomes))
    )
    prompt = Prompt(prompt_id=name, token_ids=(1,), text="", data_source="t")
    found = tuple(Reward(outcome) if isinstance(outcome, float) else outcome for outcome in outcomes)
    return ScoredGroup(group=TrajectoryGroup(prompt=prompt, trajectories=trajectories), outcomes=found)


def good(name: str) -> ScoredGroup:
    return group(name, 0.0, 1.0)


def flat(name: str) -> ScoredGroup:
    return group(name, 1.0, 1.0)


def names(selection: Selection) -> list[str]:
    return [each.group.prompt.prompt_id for each in selection.groups]


def test_without_a_filter_the_first_batch_is_the_step() -> None:
    selection = Selection(GroupFilterPlan(), wanted=2)
    batch = [flat("a"), group("b", Invalid("exception"))]
    selection.add(batch)
    assert selection.complete and selection.groups == batch and selection.metrics() == {}


def test_refill_collects_until_the_step_is_full_and_drops_the_surplus() -> None:
    selection = Selection(GroupFilterPlan(strategy="refill", above_std=0.0, max_batches=3), wanted=3)
    selection.add([good("a"), flat("b"), flat("c")])
    assert not selection.complete
    selection.add([good("d"), group("e", Invalid("exception"), 1.0), group("f", 0.0, 1.0)])
    assert selection.complete and names(selection) == ["a", "d", "f"]
    selection = Selection(GroupFilterPlan(strategy="refill", above_std=0.0), wanted=3)
    selection.add([good("a"), good("b"), flat("c")])
    selection.add([good("d"), good("e"), good("f")])
    assert names(selection) == ["a", "b", "d"]
    assert selection.metrics() == {
        "rollout/batches": 2.0,
        "rollout/groups_sampled": 6.0,
        "rollout/groups_passed": 5.0,
        "rollout/groups_kept": 3.0,
    }
    assert selection.sampled_tokens == 24  # 6 groups x 2 responses x 2 tokens


def test_refill_stops_with_what_passed_and_what_to_change() -> None:
    selection = Selection(GroupFilterPlan(strategy="refill", above_std=0.0, max_batches=2), wanted=2)
    selection.add([flat("a"), good("b")])
    with pytest.raises(RunStopped) as raised:
        selection.add([flat("c"), flat("d")])
    text = str(raised.value)
    assert text.startswith(
        "1 of 4 sampled groups passed the group filter (reward: standard deviation above 0) in 2 batches"
    )
    assert "a step needs 2" in text
    assert "rollout.samples_per_prompt" in text and "group_filter.max_batches" in text


def test_replace_repeats_the_groups_that_pass_in_the_places_of_the_others() -> None:
    selection = Selection(GroupFilterPlan(strategy="replace", above_std=0.0, min_kept_share=0.5), wanted=4)
    selection.add([flat("a"), good("b"), flat("c"), flat("d")])  # a quarter passes: the whole batch is sampled again
    assert not selection.complete and selection.groups == []
    selection.add([flat("e"), good("f"), flat("g"), good("h")])
    assert selection.complete and names(selection) == ["f", "f", "h", "h"]
    assert selection.metrics()["rollout/groups_passed"] == 3.0


@pytest.mark.parametrize(("passing", "groups"), [(7, 100), (5, 59), (508, 599)])
def test_a_share_that_is_just_reached_is_reached(passing: int, groups: int) -> None:
    """0.07 x 100 is 7.000000000000001 in floating point: products are above the count, quotients are what was written."""
    selection = Selection(
        GroupFilterPlan(strategy="replace", above_std=0.0, min_kept_share=passing / groups), wanted=groups
    )
    selection.add([*(good(f"g{i}") for i in range(passing)), *(flat(f"f{i}") for i in range(groups - passing))])
    assert selection.complete


def test_replace_has_nothing_to_repeat_when_no_group_passes() -> None:
    selection = Selection(GroupFilterPlan(strategy="replace", above_std=0.0, max_batches=1), wanted=2)
    with pytest.raises(RunStopped, match=r"0 of 2 sampled groups passed .* no batch had the share of 0"):
        selection.add([flat("a"), flat("b")])


def test_prefer_fills_the_step_with_groups_that_pass_and_then_with_the_others() -> None:
    plan = GroupFilterPlan(strategy="prefer", above_std=0.0, oversample=2)
    selection = Selection(plan, wanted=3)
    selection.add([flat("a"), good("b"), flat("c")])
    assert not selection.complete
    selection.add([flat("d"), good("e"), flat("f")])
    assert selection.complete and names(selection) == ["b", "e", "a"]
    assert selection.metrics()["rollout/groups_sampled"] == 6 and selection.metrics()["rollout/groups_passed"] == 2
    selection = Selection(plan, wanted=2)
    selection.add([good("a"), good("b")])
    selection.add([good("c"), flat("d")])
    assert names(selection) == ["a", "b"]


def test_a_bound_on_tokens_looks_at_the_longest_response() -> None:
    # responses of 2 tokens: fewer than 3, not fewer than 2
    for bound, kept in ((3, ["a"]), (2, [])):
        selection = Selection(GroupFilterPlan(strategy="refill", below_tokens=bound), wanted=1)
        selection.add([good("a")])
        assert names(selection) == kept


def test_drop_goes_on_with_fewer() -> None:
    selection = Selection(GroupFilterPlan(strategy="drop", above_std=0.0), wanted=3)
    selection.add([flat("a"), good("b"), flat("c")])
    assert selection.complete and names(selection) == ["b"]
    assert selection.metrics()["rollout/groups_kept"] == 1.0


def test_mask_keeps_all_and_takes_the_others_out_of_the_loss() -> None:
    selection = Selection(GroupFilterPlan(strategy="mask", above_std=0.0), wanted=3)
    selection.add([good("a"), flat("b"), good("c")])
    assert selection.complete and names(selection) == ["a", "b", "c"]
    assert [each.kept for each in selection.groups] == [True, False, True]
    assert (selection.metrics()["rollout/groups_passed"], selection.metrics()["rollout/groups_kept"]) == (2.0, 2.0)


def test_drop_without_any_keeps_them_to_be_looked_at_and_out_of_the_loss() -> None:
    selection = Selection(GroupFilterPlan(strategy="drop", above_std=0.0), wanted=2)
    selection.add([flat("a"), flat("b")])
    assert selection.complete and [each.kept for each in selection.groups] == [False, False]
    assert selection.metrics()["rollout/groups_kept"] == 0.0


def test_filter_can_look_at_a_term() -> None:
    plan = GroupFilterPlan(strategy="drop", metric="acc", above_std=0.0)
    selection = Selection(plan, wanted=2)
    same = group("a", Reward(0.3, (("acc", 1.0),)), Reward(0.7, (("acc", 1.0),)))
    other = group("b", Reward(0.5, (("acc", 1.0),)), Reward(0.5, (("acc", 0.0),)))
    selection.add([same, other])
    assert names(selection) == ["b"]


def test_term_that_responses_do_not_have_stops_the_run() -> None:
    selection = Selection(GroupFilterPlan(strategy="drop", metric="accuracy"), wanted=1)
    with pytest.raises(RunStopped, match=r"accuracy is not among the terms of the responses to a \(its terms: acc\)"):
        selection.add([group("a", Reward(1.0, (("acc", 1.0),)))])


def test_without_bounds_refill_replaces_groups_without_any_score() -> None:
    """As verl's sync_refill_failed_groups: a flat group stays, one whose responses all failed makes room for another."""
    selection = Selection(GroupFilterPlan(strategy="refill", above_std=None), wanted=2)
    selection.add([flat("a"), group("b", Invalid("sampler"), Invalid("sampler"))])
    assert not selection.complete
    selection.add([group("c", Invalid("sampler"), 1.0), good("d")])
    assert selection.complete and names(selection) == ["a", "c"]
