"""What is said about advantages, losses and rollout correction that cannot work, or do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.config.checks.batches import batch_warnings
from posttrain.config.roles import needs_old_logprobs
from posttrain.plan.checks.train import check, warnings_of

AT = "loss.rollout_correction"


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": ["x"]}} | sections)


def correcting(loss: str = "ppo_clip", **correction: Any) -> RunConfig:
    return config(loss={"name": loss, "rollout_correction": correction})


@pytest.mark.parametrize(
    "correction",
    [
        {"weights": "token", "weight_high": 3.0, "normalize": True},
        {"weights": "sequence", "weight_low": 0.5},
        {"reject": ["token_k1", "sequence_mean_k3"], "reject_bounds": ["0.5_2", "0.1"]},
        {"weights": "token", "proximal": "loglinear"},
        {"weights": "sequence", "weight_low": 0.5, "proximal": "loglinear"},
        {"use_rollout_logprobs": True},
        {"use_rollout_logprobs": True, "reject": ["token_k2"], "reject_bounds": ["0.5"]},
    ],
)
def test_corrections_that_work_are_accepted_without_a_word(correction: dict[str, Any]) -> None:
    assert check(correcting(**correction)) == []
    assert warnings_of(correcting(**correction)) == []


@pytest.mark.parametrize(
    ("correction", "field", "said"),
    [
        ({"weights": "token", "weight_low": 3.0}, "weight_low", "above weight_high = 2, so every weight would be 0"),
        ({"reject": ["token_k1"]}, "reject_bounds", "has no bounds"),
        ({"reject": ["tokn_k1"], "reject_bounds": ["2"]}, "reject", "there is no rule 'tokn_k1'"),
        ({"reject": ["token_k1"], "reject_bounds": ["2", "3"]}, "reject_bounds", "1 rules have 2 bounds"),
        ({"reject": ["token_k1"], "reject_bounds": ["2_0.5"]}, "reject_bounds", "leave nothing"),
        ({"reject": ["token_k2"], "reject_bounds": ["0.5_2"]}, "reject_bounds", "never negative"),
        ({"use_rollout_logprobs": True, "weights": "token"}, "weights", "would correct the gap twice"),
        ({"proximal": "loglinear"}, "proximal", "and there are none"),
        ({"proximal": "loglinear", "weights": "token", "normalize": True}, "proximal", "is over the whole step"),
        (
            {"proximal": "loglinear", "weights": "token", "reject": ["token_k1"], "reject_bounds": ["2"]},
            "proximal",
            "rules compare the log-probs of the whole step",
        ),
        ({"proximal": "loglinear", "weights": "token", "loss": "gpg"}, "proximal", "gpg has no ratio"),
    ],
)
def test_corrections_that_cannot_be_meant_are_refused(correction: dict[str, Any], field: str, said: str) -> None:
    (problem,) = check(correcting(**correction))
    assert said in problem.what and problem.field == f"{AT}.{field}" and problem.fix


def test_a_misspelt_rule_is_answered_with_the_right_one() -> None:
    (problem,) = check(correcting(reject=["tokn_k1"], reject_bounds=["2"]))
    assert "token_k1" in problem.fix


def test_weights_go_with_losses_whose_ratio_does_not_correct_the_gap_already() -> None:
    assert check(correcting("gpg", weights="token", use_rollout_logprobs=True)) == []
    (problem,) = check(correcting("rollout_is", weights="token"))
    assert "the ratio of rollout_is is to the sampler already" in problem.what


def test_parts_of_a_correction_that_do_nothing_are_pointed_out() -> None:
    assert warnings_of(correcting(weight_high=3.0, normalize=True, reject_bounds=["2"])) == [
        f"{AT}.weight_high has no effect: {AT}.weights is none",
        f"{AT}.normalize has no effect: {AT}.weights is none",
        f"{AT}.reject_bounds has no effect: {AT}.reject names no rule",
    ]


def test_interpolated_log_probs_need_no_forward_pass() -> None:
    assert not needs_old_logprobs(correcting(weights="token", proximal="loglinear"))
    assert needs_old_logprobs(correcting(weights="token"))


def test_old_log_probs_are_needed_by_what_reads_them_before_the_update() -> None:
    assert not needs_old_logprobs(config())
    assert not needs_old_logprobs(correcting(use_rollout_logprobs=True))
    assert needs_old_logprobs(correcting(weights="token"))
    assert needs_old_logprobs(correcting(reject=["token_k1"], reject_bounds=["2"]))
    assert needs_old_logprobs(config(advantage={"name": "optimal_token_baseline"}))
    assert needs_old_logprobs(config(reward={"kl": {"coef": 0.1}}))


def test_a_token_budget_for_scoring_counts_when_the_policy_is_scored() -> None:
    given = {"reference": {"max_tokens_per_micro_batch": 4096}}
    (said,) = batch_warnings(config(**given))
    assert "this run computes no log-probs without gradient" in said
    assert list(batch_warnings(config(**given, loss={"rollout_correction": {"weights": "token"}}))) == []
    several = {"data": {"train_files": ["x"], "prompts_per_step": 4}, "policy": {"sequences_per_mini_batch": 8}}
    assert list(batch_warnings(config(**given, **several))) == []
    bypass = {"rollout_correction": {"use_rollout_logprobs": True}}
    assert len(list(batch_warnings(config(**given, **several, loss=bypass)))) == 1


TERMS = {"terms": [{"name": "exact_match"}, {"name": "style", "path": "r.py"}]}


def gdpo(**advantage: Any) -> RunConfig:
    return config(advantage={"name": "gdpo"} | advantage, reward=TERMS)


def test_gdpo_may_choose_and_weigh_terms_of_the_reward() -> None:
    assert check(gdpo()) == check(gdpo(term_weights=[1.0, 0.5])) == []
    assert check(gdpo(terms=["style", "style/words"], term_weights=[1.0, 0.5])) == []
    (problem,) = check(gdpo(terms=["styl"]))
    assert "names styl, which is no term of the reward (known: exact_match, style)" in problem.what
    (problem,) = check(gdpo(term_weights=[1.0]))
    assert problem.what == "advantage.term_weights has 1 numbers for 2 terms"
    assert warnings_of(config(advantage={"terms": ["exact_match"]})) == [
        "advantage.terms has no effect: grpo does not use it (gdpo would)"
    ]


def test_what_shapes_the_sum_has_no_effect_on_terms() -> None:
    said = warnings_of(config(advantage={"name": "gdpo"}, reward={"clip": 2.0, "kl": {"coef": 0.1}}))
    assert [text.split(" has no effect")[0] for text in said] == ["reward.clip", "reward.kl.coef"]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_that_keeps_its_reward_is_said_to_have_no_baseline(name: str) -> None:
    lone = {"advantage": {"name": name, "lone_sample_keeps_reward": True}}
    alone = config(rollout={"samples_per_prompt": 1}, **lone)
    [said] = [text for text in warnings_of(alone) if "baseline" in text]
    assert said.startswith(f"a group of one has no baseline: {name} compares the responses to a prompt")
    assert not any("no baseline" in text for text in warnings_of(config(rollout={"samples_per_prompt": 2}, **lone)))


def test_remax_does_not_go_with_normalised_rewards() -> None:
    assert check(config(advantage={"name": "remax"}, reward={"clip": 2.0})) == []
    (problem,) = check(config(advantage={"name": "remax"}, reward={"normalize_std": "batch"}))
    assert problem.field == "reward.normalize_std"


def test_numbers_of_other_aggregations_and_losses_are_pointed_out() -> None:
    assert warnings_of(config(loss={"norm_tokens": 64})) == [
        "loss.norm_tokens has no effect: loss.aggregation is token_mean"
    ]
    assert warnings_of(config(loss={"norm_tokens": 64, "aggregation": "sequence_mean_token_sum_norm"})) == []
    assert warnings_of(config(loss={"name": "cross_entropy"})) == [
        "advantage.name has no effect: cross_entropy does not read advantages"
    ]
