"""Rules with their bounds, from the words of a configuration."""

from __future__ import annotations

import pytest

from posttrain.config.rejection import RULES, RejectionRule, rejection_rules


def test_rules_have_one_bound_for_all_or_one_each() -> None:
    k1, k3 = "token_k1", "sequence_mean_k3"
    both = (
        RejectionRule(statistic="k1", reduction="token", high=2.0, low=0.5),
        RejectionRule(statistic="k3", reduction="sequence_mean", high=0.1),
    )
    assert rejection_rules([k1, k3], ["0.5_2", "0.1"]) == both
    assert [rule.high for rule in rejection_rules([k1, k3], ["2"])] == [2.0, 2.0]
    assert rejection_rules([], []) == rejection_rules([], ["2"]) == ()
    assert len(RULES) == 21  # 4 statistics x 5 reductions, and step_m2
    assert [rule.reduction for rule in rejection_rules(RULES, ["2"])][-2:] == ["turn_mean", "step"]


def test_the_second_moment_of_a_step_has_a_bound_of_its_own() -> None:
    [rule] = rejection_rules(["step_m2"], ["0.04"])
    assert rule == RejectionRule(statistic="m2", reduction="step", high=0.04)
    with pytest.raises(ValueError, match="step_m2 is never negative and has an upper bound only"):
        rejection_rules(["step_m2"], ["0.01_0.04"])


@pytest.mark.parametrize(
    ("names", "bounds", "said"),
    [
        (["token_k1", "token_k2", "token_k3"], ["1", "2"], "3 rules have 2 bounds"),
        (["token_k4"], ["2"], "there is no rule 'token_k4' .known: token_k1"),
        (["token_k2"], ["0.5_2"], "token_k2 is never negative and has an upper bound only"),
        (["token_k1"], ["2_0.5"], "leave nothing: from 2 to 0.5"),
        (["token_k1"], ["0.5"], "leave nothing: from 2 to 0.5 .a single bound u of k1 is 1/u to u"),
        (["token_k1"], ["two"], "'two', and a number, or lower_upper, is expected"),
        (["token_k1"], ["a_2"], "'a_2', and a number"),
        (["token_k3"], ["-1"], "bounds are above 0"),
        (["token_k3"], ["inf"], "bounds are above 0"),
        (["token_k1"], ["0_2"], "bounds are above 0"),
    ],
)
def test_what_cannot_be_meant_is_said(names: list[str], bounds: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rejection_rules(names, bounds)
