"""Policy losses of single tokens, by hand; ratio r = exp(policy - old)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.errors import RequestError, ShapeError
from posttrain.registry import POLICY_LOSSES

PPO = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}


def loss_and_gradient(
    name: str, ratios: list[float], advantages: list[float], *, old: float = -1.0, score: float = 1.0, **given: Any
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Of one response with these ratios, all tokens sampled with probability exp(old)."""
    old_logprobs = torch.full((1, len(ratios)), old, dtype=torch.float64)
    policy = (old_logprobs + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    advantage = torch.tensor([advantages], dtype=torch.float64)
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    tensors = {"policy_logprobs": policy, "old_logprobs": old_logprobs, "rollout_logprobs": old_logprobs}
    inputs: dict[str, Any] = tensors | {"advantages": advantage, "mask": mask, "scores": torch.tensor([score])}
    inputs["mini_batch_tokens"] = given.pop("mini_batch_tokens", len(ratios))
    inputs["chosen"] = None
    loss, report = POLICY_LOSSES.get(name)(*(inputs[each] for each in POLICY_LOSSES.inputs(name)), **given)
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    return loss[0].tolist(), gradient[0].tolist(), report


def test_one_ratio_per_turn_is_the_geometric_mean_of_its_tokens() -> None:
    # turns of ratios 4, 1 and 1.5: sqrt(4 x 1) = 2, clipped to 1.28 where A = 1; with A = -1 the loss is 2, each token's
    # gradient 2 / 2 from both tokens' losses, 2 in all; the second turn has 1.5, clipped
    ratios = torch.tensor([[4.0, 1.0, 9.0, 1.5]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True]])
    policy = ratios.log().requires_grad_()
    old = torch.zeros(1, 4, dtype=torch.float64)
    ppo_clip = POLICY_LOSSES.get("ppo_clip")
    loss, report = ppo_clip(policy, old, torch.tensor([[-1.0, -1.0, 5.0, 1.0]]).double(), mask, ratio_of="turn", **PPO)
    assert loss[0].tolist() == pytest.approx([2.0, 2.0, 0.0, -1.28])
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    assert gradient[0].tolist() == pytest.approx([2.0, 2.0, 0.0, 0.0])
    assert report["clip_fraction"].tolist() == [[0, 0, 0, 1]]


def test_ppo_clip_in_its_four_corners() -> None:
    # A = 1: r = 1.5 clips to 1.28, loss -1.28, no gradient; r = 0.5 is not clipped: -0.5, gradient -A r = -0.5
    # A = -2: r = 1.5: max(3, 2.56) = 3, gradient 3; r = 0.5 clips to 0.8: max(1, 1.6) = 1.6, no gradient
    loss, gradient, report = loss_and_gradient("ppo_clip", [1.5, 0.5, 1.5, 0.5], [1, 1, -2, -2], **PPO)
    assert loss == pytest.approx([-1.28, -0.5, 3.0, 1.6])
    assert gradient == pytest.approx([0.0, -0.5, 3.0, 0.0])
    assert report["clip_fraction"].tolist() == [[1, 0, 0, 1]]
    assert report["ratio_mean"].tolist()[0] == pytest.approx([1.5, 0.5, 1.5, 0.5])
    # r - 1 - ln r: 0.5 - 0.405465 = 0.094535; -0.5 + 0.693147 = 0.193147
    assert report["kl_old"].tolist()[0] == pytest.approx([0.094535, 0.193147] * 2, abs=1e-6)


def test_dual_clip_bounds_only_negative_advantages() -> None:
    # A = -2, r = 10, c = 3: 20 becomes 6, without gradient; A = 2, r = 10: -2 x 1.28
    loss, gradient, report = loss_and_gradient("ppo_clip", [10, 10], [-2, 2], dual_clip=3.0, **PPO)
    assert loss == pytest.approx([6.0, -2.56])
    assert gradient == [0.0, 0.0]
    assert report["dual_clip_fraction"].tolist() == [[1, 0]]


def test_on_policy_every_loss_but_the_pulls_has_the_policy_gradient() -> None:
    # at r = 1 the gradient is -A, whatever the loss
    given: dict[str, dict[str, Any]] = {
        "ppo_clip": PPO,
        "gpg": {},
        "importance_sampling": {},
        "topr": {"positive_weight": 1.0, "negative_weight": 1.0},
        "rollout_is": PPO,
        "cispo": PPO,
        "sapo": {"gate_sharpness_positive": 1.0, "gate_sharpness_negative": 1.05},
        "dro": {"dro_beta": 0.5},
        "dppo_tv": PPO | {"weight_limit": 20.0},
        "dppo_kl": PPO | {"weight_limit": 20.0},
        "kl_cov": {"covariance_share": 1.0, "covariance_kl_coef": 0.0, "mini_batch_tokens": 2},
        "clip_cov": PPO
        | {"covariance_share": 0.5, "covariance_low": 98.0, "covariance_high": 99.0, "mini_batch_tokens": 2},
    }
    for name, numbers in given.items():
        _, gradient, _ = loss_and_gradient(name, [1, 1], [2, -3], **numbers)
        assert gradient == pytest.approx([-2, 3]), name


def test_gspo_has_one_ratio_per_response() -> None:
    # log ratios ln 4 and 0: mean ln 2, s = 2, clipped at 1.28 for A = 1; with wide clips loss -2, gradient -2 per token
    assert loss_and_gradient("gspo", [4, 1], [1, 1], **PPO)[0] == pytest.approx([-1.28, -1.28])
    loss, gradient, report = loss_and_gradient("gspo", [4, 1], [1, 1], clip_ratio_low=0.2, clip_ratio_high=9.0)
    assert loss == pytest.approx([-2, -2])
    assert gradient == pytest.approx([-2, -2])
    assert report["clip_fraction"].tolist() == [[0, 0]]


def test_geo_mean_clips_logs_on_one_side() -> None:
    # A = 1: ln 4 clips to 0.4, ln 0.25 stays: mean (0.4 - 1.386294) / 2 = -0.493147; -exp of it = -0.610701, on both
    # tokens. The gradient of the sum of both: -0.610701 x 2 / 2 on the token that was not clipped.
    loss, gradient, report = loss_and_gradient("geo_mean", [4, 0.25], [1, 1], clip_ratio_low=0.4, clip_ratio_high=0.4)
    assert loss == pytest.approx([-0.610701] * 2, abs=1e-6)
    assert gradient == pytest.approx([0.0, -0.610701], abs=1e-6)
    assert report["clip_fraction"].tolist() == [[1, 0]]


def test_sapo_gates_by_the_sign_of_the_advantage() -> None:
    # A = 1, r = 2, tau 1: 4 sigmoid(1) = 2.924234; A = -1, tau 2: (4 / 2) sigmoid(2) = 1.761594
    loss, _, _ = loss_and_gradient("sapo", [2, 2], [1, -1], gate_sharpness_positive=1.0, gate_sharpness_negative=2.0)
    assert loss == pytest.approx([-2.924234, 1.761594], abs=1e-6)


def test_sppo_regresses_the_log_ratio_of_the_response_on_its_advantage() -> None:
    # ratios 2 and 1: ln 2 in all; eta 0.5 x A 3 = 1.5: (0.693147 - 1.5)^2 = 0.651012 on both tokens; gradient of their sum:
    # 2 x 2 x (0.693147 - 1.5) = -3.227411 on each
    loss, gradient, report = loss_and_gradient("sppo", [2, 1], [3, 3], advantage_scale=0.5)
    assert loss == pytest.approx([0.651012] * 2, abs=1e-6)
    assert gradient == pytest.approx([-3.227411] * 2, abs=1e-6)
    assert report["sequence_log_ratio"][0].tolist() == pytest.approx([math.log(2)] * 2)
    assert report["sequence_log_ratio_target"][0].tolist() == [1.5, 1.5]


def test_outcome_cross_entropy_reads_the_log_ratio_as_a_logit() -> None:
    # ratios 2 and 4: ln 8 = 2.079442, x 0.5 = ln 2.828427: sigmoid 0.738796. Score 1: -ln 0.738796 = 0.302733, gradient of the
    # sum over both tokens 2 x 0.5 x (0.738796 - 1); score 0: -ln 0.261204 = 1.342454 and 0.738796; score 0.25: 1.082523
    for score, value, gradient in ((1.0, 0.302733, -0.261204), (0.0, 1.342454, 0.738796), (0.25, 1.082523, 0.488796)):
        loss, found, _ = loss_and_gradient("outcome_cross_entropy", [2, 4], [9, 9], score=score, log_ratio_scale=0.5)
        assert loss == pytest.approx([value] * 2, abs=1e-6) and found == pytest.approx([gradient] * 2, abs=1e-6)


def test_gpg_is_minus_advantage_times_log_prob() -> None:
    # log pi = -1 + ln 2 = -0.306853; -3 x that = 0.920558
    loss, gradient, _ = loss_and_gradient("gpg", [2], [3])
    assert loss == pytest.approx([0.920558], abs=1e-6)
    assert gradient == [-3.0]


def test_cispo_keeps_a_gradient_on_clipped_tokens() -> None:
    # weight clip(1.5) = 1.28: gradient -A x 1.28; weight clip(0.5) = 0.8
    _, gradient, report = loss_and_gradient("cispo", [1.5, 0.5, 1.1], [1, 1, 1], **PPO)
    assert gradient == pytest.approx([-1.28, -0.8, -1.1])
    assert report["clip_fraction"].tolist() == [[1, 1, 0]]


def test_cispo_can_drop_the_tokens_that_ppo_would_stop() -> None:
    # A = 1: 1.5 is beyond 1.28 (dropped), 0.5 is below but A pulls it back (weight 0.8); A = -1: the other way round
    loss, gradient, report = loss_and_gradient("cispo", [1.5, 0.5, 1.5, 0.5], [1, 1, -1, -1], drop_clipped=True, **PPO)
    assert gradient == pytest.approx([0, -0.8, 1.28, 0])
    assert loss[0] == loss[3] == 0 and report["clip_fraction"].tolist() == [[1, 1, 1, 1]]


def test_rolls_tis_is_cispo_between_0_and_1() -> None:
    # -sg(clip(r, 0, 1)) A log pi: weights 1, 0.5, 1
    _, gradient, _ = loss_and_gradient("cispo", [2.0, 0.5, 1.0], [1, 1, -2], clip_ratio_low=1.0, clip_ratio_high=0.0)
    assert gradient == pytest.approx([-1, -0.5, 2])


def test_topr_tapers_bad_responses_only() -> None:
    numbers = {"positive_weight": 2.0, "negative_weight": 0.5}
    # score 1: -2 A, whatever the ratio; score 0: -0.5 min(r, 1) A
    _, gradient, report = loss_and_gradient("topr", [3.0, 0.5], [1, 1], score=1.0, **numbers)
    assert gradient == pytest.approx([-2, -2]) and not report["clip_fraction"].any()
    loss, gradient, report = loss_and_gradient("topr", [3.0, 0.5], [-1, -1], score=0.0, **numbers)
    assert gradient == pytest.approx([0.5, 0.25])
    # log pi = -1 + ln 3 = 0.098612; 0.5 x that
    assert loss[0] == pytest.approx(0.049306, abs=1e-6)
    assert report["clip_fraction"].tolist() == [[1, 0]]


def test_importance_sampling_has_no_clip() -> None:
    loss, gradient, _ = loss_and_gradient("importance_sampling", [10.0, 0.1], [1, -2])
    assert loss == pytest.approx([-10, 0.2])
    assert gradient == pytest.approx([-10, 0.2])


def test_rollout_is_leaves_out_what_sampler_and_policy_see_differently() -> None:
    # 1.5 is above 1.28, 0.5 below 0.8: no loss; 1.1: -A 1.1 log pi = 2 x 1.1 x (-1 + ln 1.1) = -1.990318
    loss, gradient, report = loss_and_gradient("rollout_is", [1.5, 0.5, 1.1], [1, 1, -2], **PPO)
    assert loss == pytest.approx([0, 0, -1.990318], abs=1e-6)
    assert gradient == pytest.approx([0, 0, 2.2])
    assert report["clip_fraction"].tolist() == [[1, 1, 0]]


def test_cross_entropy_is_minus_the_log_prob() -> None:
    loss, gradient, _ = loss_and_gradient("cross_entropy", [1, 2], [5, -5])
    assert loss == pytest.approx([1, 0.306853], abs=1e-6)
    assert gradient == [-1, -1]


def test_dro_pulls_back_quadratically() -> None:
    # ROLL's kimi15 is this with its tau as beta.
    # u = ln 2: loss -2 (-1 + u) + 0.25 u^2 = 0.613706 + 0.120113; gradient -2 + 0.5 u = -1.653426
    loss, gradient, _ = loss_and_gradient("dro", [2], [2], dro_beta=0.5)
    assert loss == pytest.approx([0.733819], abs=1e-6)
    assert gradient == pytest.approx([-1.653426], abs=1e-6)


def test_dppo_tv_looks_at_probabilities_not_ratios() -> None:
    numbers = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "weight_limit": 20.0}
    # 0.5 -> 0.75 moved by 0.25: dropped for A > 0; 0.5 -> 0.25 is dropped for A < 0 and kept for A > 0
    _, gradient, report = loss_and_gradient("dppo_tv", [1.5, 0.5, 0.5], [1, -1, 1], old=math.log(0.5), **numbers)
    assert gradient == pytest.approx([0, 0, -0.5])
    assert report["clip_fraction"].tolist() == [[1, 1, 0]]
    # 0.001 -> 0.1 moved by 0.099: kept, though the ratio is 100; it weighs 20
    _, gradient, _ = loss_and_gradient("dppo_tv", [100], [1], old=math.log(0.001), **numbers)
    assert gradient == pytest.approx([-20])


def test_dppo_kl_drops_moves_away_and_keeps_moves_back() -> None:
    numbers = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "weight_limit": 20.0}
    # 0.5 -> 0.75: 0.5 ln(0.5 / 0.75) + 0.5 ln(0.5 / 0.25) = -0.202733 + 0.346574 = 0.143841 > 0.05
    # for A > 0 that is further away (dropped), for A < 0 the gradient leads back (kept, weight 1.5)
    _, gradient, _ = loss_and_gradient("dppo_kl", [1.5, 1.5], [1, -1], old=math.log(0.5), **numbers)
    assert gradient == pytest.approx([0, 1.5])
    # 0.5 -> 0.6: 0.5 ln(0.5 / 0.6) + 0.5 ln(0.5 / 0.4) = 0.020411 <= 0.05: kept
    _, gradient, _ = loss_and_gradient("dppo_kl", [1.2], [1], old=math.log(0.5), **numbers)
    assert gradient == pytest.approx([-1.2])


def test_kl_cov_pulls_back_the_tokens_of_largest_covariance() -> None:
    # log-probs -1 + ln(2, 0.5, 1) = -0.307, -1.693, -1 (mean -1); advantages 1, -1, 0 (mean 0)
    # covariances 0.693, 0.693, 0: with a share of 2/3 the first two get 0.5 |ln r| = 0.346574 on top of -A r
    numbers = {"covariance_share": 0.67, "covariance_kl_coef": 0.5, "mini_batch_tokens": 3}
    loss, gradient, _ = loss_and_gradient("kl_cov", [2, 0.5, 1], [1, -1, 0], **numbers)
    assert loss == pytest.approx([-2 + 0.346574, 0.5 + 0.346574, 0], abs=1e-6)
    assert gradient == pytest.approx([-2 + 0.5, 0.5 - 0.5, 0], abs=1e-6)


def test_clip_cov_drops_as_many_as_asked_and_the_same_every_time() -> None:
    # covariances of A = +-1 with log r = +-0.05 are 0.05 for all four; two of them may be dropped
    ratios = [math.exp(0.05), math.exp(-0.05), math.exp(0.05), math.exp(-0.05)]
    numbers = PPO | {
        "covariance_share": 0.5,
        "covariance_low": 0.0,
        "covariance_high": 1.0,
        "mini_batch_tokens": 4,
    }
    loss, gradient, report = loss_and_gradient("clip_cov", ratios, [1, -1, 1, -1], **numbers)
    dropped = [value == 0 for value in loss]
    assert sum(dropped) == 2
    assert [value == 0 for value in gradient] == dropped
    assert report["clip_fraction"].bool().tolist() == [dropped]
    assert loss_and_gradient("clip_cov", ratios, [1, -1, 1, -1], **numbers)[0] == loss


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_choice_in_the_mini_batch_is_refused_for_a_part_of_it(name: str) -> None:
    numbers = PPO | {"covariance_share": 0.5, "covariance_low": 0.0, "covariance_high": 1.0, "mini_batch_tokens": 9}
    if name == "kl_cov":
        numbers = {"covariance_share": 0.5, "covariance_kl_coef": 1.0, "mini_batch_tokens": 9}
    with pytest.raises(RequestError, match="holds 2 of 9 of them"):
        loss_and_gradient(name, [1, 1], [1, 1], **numbers)


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ShapeError, match=r"old_logprobs \[1, 3\]"):
        mask = torch.ones(1, 2).bool()
        POLICY_LOSSES.get("ppo_clip")(torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2), mask, **PPO)
