"""Policy losses with their gradients, aggregation and the value loss, against verl's and SkyRL's numbers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.algos.objective import aggregate, loss_weights
from posttrain.algos.value_loss import value_loss
from posttrain.records.batches import LossCounts
from posttrain.registry import POLICY_LOSSES

AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",  # by the padded width, where nothing else is given
    "own": "sequence_mean_token_mean",  # geo_mean's
}


def counts_of(mask: Tensor) -> LossCounts:
    return LossCounts(tokens=int(mask.sum()), sequences=int(mask.any(dim=1).sum()))


def verl_numbers(params: dict[str, Any]) -> dict[str, Any]:
    """verl's parameters under our names."""
    return {
        "clip_ratio_low": params.get("clip_ratio_low"),
        "clip_ratio_high": params.get("clip_ratio_high"),
        "dual_clip": params.get("clip_ratio_c"),
        "ratio_of": "token",
        "weight_limit": params.get("clip_ratio_c"),
        "gate_sharpness_positive": params.get("tau_pos"),
        "gate_sharpness_negative": params.get("tau_neg"),
        "covariance_share": params.get("clip_cov_ratio", params.get("kl_cov_ratio")),
        "covariance_low": params.get("clip_cov_lb"),
        "covariance_high": params.get("clip_cov_ub"),
        "covariance_kl_coef": params.get("ppo_kl_coef"),
        "dro_beta": params.get("dro_beta"),
        "drop_clipped": False,
    }


def run(
    case: Any, name: str, numbers: dict[str, Any], dtype: torch.dtype, old_logprobs: str = "old_logprobs"
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The policy log-probs (a leaf), the loss per token, and the report."""
    loss = POLICY_LOSSES.get(name)
    keywords = [p.name for p in inspect.signature(loss).parameters.values() if p.kind is p.KEYWORD_ONLY]
    tensors: dict[str, Any] = {name: case.tensor(name, dtype) for name in ("policy_logprobs", "advantages")}
    tensors["mask"] = case.mask()
    tensors["old_logprobs"] = tensors["rollout_logprobs"] = case.tensor(old_logprobs, dtype)
    tensors["mini_batch_tokens"] = int(case.mask().sum())
    tensors["chosen"] = None  # all of the mini-batch is here
    policy = tensors["policy_logprobs"].requires_grad_()
    arguments = [tensors[name] for name in POLICY_LOSSES.inputs(name)]
    token_loss, report = loss(*arguments, **{key: numbers[key] for key in keywords})
    return policy, token_loss, report


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.golden("policy_losses.json")
def test_verl_policy_losses(case: Any, dtype: torch.dtype) -> None:
    mode, mask = case.params["mode"], case.mask()
    name = "ppo_clip" if mode == "vanilla" else mode
    policy, token_loss, report = run(case, name, verl_numbers(case.params), dtype)
    assert (token_loss[~mask] == 0).all()
    if "rollout_is_weights" in case.inputs:  # they multiply the token loss; geo_mean's row by their geometric mean
        token_loss = token_loss * loss_weights(
            case.tensor("rollout_is_weights", dtype), mask, per_response=POLICY_LOSSES.facts(name).per_response
        )
    accepted = [case.outputs, *case.content.get("also_accept", [])]
    extreme = "extreme" in case["name"]

    def agrees(outputs: dict[str, Any]) -> bool:
        for theirs, expected in outputs["loss"].items():
            loss = aggregate(token_loss, mask, AGGREGATIONS[theirs], counts_of(mask), norm_tokens=mask.shape[1])
            if not case.matches(loss, expected, relative_to_largest=extreme):
                return False
            if theirs in outputs["grad"]:
                (gradient,) = torch.autograd.grad(loss, policy, retain_graph=True)
                assert (gradient[~mask] == 0).all()
                if not case.matches(gradient, outputs["grad"][theirs], relative_to_largest=extreme):
                    return False
        return True

    assert any(agrees(outputs) for outputs in accepted)
    for theirs, ours in {"pg_clipfrac": "clip_fraction", "pg_clipfrac_lower": "dual_clip_fraction"}.items():
        # clip_cov and dppo report other tokens too; geo_mean splits its share by the sign of the advantage
        if mode in ("vanilla", "gspo") and ours in report and theirs in case.outputs["metrics"]:
            share = torch.where(mask, report[ours], 0.0).sum() / mask.sum()
            case.check(share, case.outputs["metrics"][theirs])


def skyrl_numbers(params: dict[str, Any]) -> dict[str, Any]:
    """SkyRL's parameters under our names."""
    covariance = params.get("clip_cov", params.get("kl_cov", {}))
    cispo, dppo, sapo = params.get("cispo", {}), params.get("dppo", {}), params.get("sapo", {})
    return {
        "clip_ratio_low": cispo.get("cispo_eps_clip_low", dppo.get("delta_low", params.get("eps_clip_low"))),
        "clip_ratio_high": cispo.get("cispo_eps_clip_high", dppo.get("delta_high", params.get("eps_clip_high"))),
        "dual_clip": params.get("clip_ratio_c"),
        "ratio_of": "token",
        "weight_limit": 1e9,
        "gate_sharpness_positive": sapo.get("tau_pos"),
        "gate_sharpness_negative": sapo.get("tau_neg"),
        "covariance_share": covariance.get("clip_ratio", covariance.get("kl_cov_frac")),
        "covariance_low": covariance.get("clip_cov_lb"),
        "covariance_high": covariance.get("clip_cov_ub"),
        "covariance_kl_coef": covariance.get("ppo_kl_coef"),
        "drop_clipped": False,
    }


SKYRL_AGGREGATIONS = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean_token_mean",
    "seq_mean_token_sum_norm": "sequence_mean_token_sum_norm",
    "prompt_mean": "prompt_mean",
    "sum": "token_sum",
}


@pytest.mark.golden("policy_losses_skyrl.json")
def test_skyrl_policy_losses(case: Any) -> None:
    mode, mask = case.params["mode"], case.mask()
    name = {"regular": "ppo_clip", "dual_clip": "ppo_clip", "dppo": "dppo_tv"}.get(mode, mode)
    # these measure the move from the sampler's log-probs
    old = "rollout_logprobs" if mode in ("dppo", "rollout_is") else "old_logprobs"
    policy, token_loss, _ = run(case, name, skyrl_numbers(case.params), torch.float64, old)
    bounds = case.params["prompt_boundaries"]
    groups = torch.tensor([prompt for prompt, (start, end) in enumerate(bounds) for _ in range(start, end)])
    counts = LossCounts(  # SkyRL counts empty rows too
        tokens=int(mask.sum()),
        sequences=len(mask),
        prompt_tokens={prompt: int(mask[start:end].sum()) for prompt, (start, end) in enumerate(bounds)},
    )
    losses = {
        theirs: aggregate(token_loss, mask, ours, counts, norm_tokens=case.params["max_seq_len"], group_index=groups)
        for theirs, ours in SKYRL_AGGREGATIONS.items()
    }
    if mode != "dppo":  # SkyRL's is -A r, ours -A sg(r) log pi: the same gradient, another value
        for theirs, expected in case.outputs["loss"].items():
            if theirs != "token_mean_legacy":  # depends on the micro-batch size; not offered
                case.check(losses[theirs], expected)
    (gradient,) = torch.autograd.grad(losses["sum" if mode == "importance_sampling" else "token_mean"], policy)
    case.check(gradient, case.outputs["grad"])


@pytest.mark.golden("aggregation.json")
def test_aggregation(case: Any) -> None:
    values, mask = case.tensor("token_loss"), case.mask()
    counts = counts_of(mask)
    for theirs, expected in case.outputs["loss"].items():
        how = {"mode": AGGREGATIONS[theirs], "counts": counts, "norm_tokens": mask.shape[1]}
        case.check(aggregate(values, mask, **how), expected)
        for split, wanted, factor in (
            (case.params.get("split"), case.outputs.get("micro_loss"), 1),
            # verl averages over ranks, so a rank's share is dp_size times ours
            (case.params.get("ranks"), case.outputs.get("rank_loss"), case.params.get("dp_size")),
        ):
            if split is not None:
                shares = [aggregate(values[rows], mask[rows], **how) * factor for rows in split]
                case.check(torch.stack(shares), wanted[theirs])


@pytest.mark.golden("value_loss.json")
def test_verl_value_loss(case: Any) -> None:
    mask, values = case.mask(), case.tensor("values").requires_grad_()
    token_loss, report = value_loss(
        values, case.tensor("old_values"), case.tensor("returns"), mask, value_clip=case.params["clip"]
    )
    for theirs, expected in case.outputs["loss"].items():
        loss = aggregate(token_loss, mask, AGGREGATIONS[theirs], counts_of(mask), norm_tokens=mask.shape[1])
        case.check(loss, expected)
        if theirs in case.outputs["grad"]:
            case.check(torch.autograd.grad(loss, values, retain_graph=True)[0], case.outputs["grad"][theirs])
    case.check(report["value_clip_fraction"][mask].mean(), case.outputs["vf_clipfrac"])


@pytest.mark.golden("kl_value_skyrl.json", "value_loss")
def test_skyrl_value_loss(case: Any) -> None:
    mask, values = case.mask(), case.tensor("values").requires_grad_()
    token_loss, _ = value_loss(
        values, case.tensor("old_values"), case.tensor("returns"), mask, value_clip=case.params["clip"]
    )
    counts = LossCounts(tokens=int(mask.sum()), sequences=len(mask))  # SkyRL counts empty rows too
    loss = aggregate(token_loss, mask, "sequence_mean_token_mean", counts)
    case.check(loss, case.outputs["loss"])
    case.check(torch.autograd.grad(loss, values)[0], case.outputs["grad"])
