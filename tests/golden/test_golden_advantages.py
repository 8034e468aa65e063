"""Advantage estimators and the statistics under them, against verl's and SkyRL's numbers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.algos.statistics import masked_mean, masked_variance, whiten
from posttrain.registry import ADVANTAGES

# The file's name of an estimator -> ours, and the numbers it was run with.
VERL: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"lone_sample_keeps_reward": True}),
    "grpo_no_std": ("grpo", {"lone_sample_keeps_reward": True, "normalize_by_std": False}),
    "grpo_passk": ("grpo_passk", {}),
    "grpo_passk_no_std": ("grpo_passk", {"normalize_by_std": False}),
    "rloo": ("rloo", {"lone_sample_keeps_reward": True}),
    "opo": ("opo", {"lone_sample_keeps_reward": True}),
    "gpg": ("gpg", {"lone_sample_keeps_reward": True}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {"lone_sample_keeps_reward": True}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}),
    "remax": ("remax", {}),
    "gae": ("gae", {}),
    "optimal_token_baseline": ("optimal_token_baseline", {}),
    "tir_optimal_token_baseline": ("tir_optimal_token_baseline", {}),
    "gdpo": ("gdpo", {"lone_sample_keeps_reward": True}),
}
SKYRL = VERL | {
    "rloo": ("rloo", {}),
    "maxrl": ("maxrl", {"lone_sample_keeps_reward": True}),
    "reinforce++": ("reinforce_plus_plus", {}),
}


def run(case: Any, name: str, given: dict[str, Any], valid: Tensor) -> Any:
    """Call the estimator the way the stage does, by the names of its parameters."""
    estimator = ADVANTAGES.get(name)
    dtype = torch.float32 if case.inputs.get("dtype") == "float32" else torch.float64
    uid = case.inputs["uid"]
    available: dict[str, Any] = {
        "valid": valid,
        "group_index": torch.tensor([sorted(set(uid)).index(each) for each in uid]),
        "response_mask": case.mask(),
    }
    if "token_rewards" in case.inputs:
        available["token_rewards"] = case.tensor("token_rewards", dtype)
        available["rewards"] = available["token_rewards"].sum(dim=1)
    if "components" in case.inputs:
        available["reward_terms"] = {
            term: torch.tensor(scores, dtype=dtype) for term, scores in case.inputs["components"].items()
        }
        weights = case.params["weights"] or [1.0] * len(case.inputs["components"])
        given = given | {"terms": list(case.inputs["components"]), "term_weights": weights}
    renamed = {"values": "values", "reward_baselines": "greedy_rewards", "old_log_probs": "old_logprobs"}
    for theirs, ours in (renamed | {"sum_pi_squared": "sum_pi_squared"}).items():
        if theirs in case.inputs:
            available[ours] = case.tensor(theirs, dtype)
    parameters = inspect.signature(estimator).parameters
    arguments = [available[p.name] for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    numbers = {"gamma": case.params.get("gamma"), "gae_lambda": case.params.get("lam")}
    chosen = {key: value for key, value in numbers.items() if key in parameters}
    return estimator(*arguments, **given, **chosen)


def agrees(case: Any, result: Any, expected: dict[str, Any], mask: Tensor) -> bool:
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    assert (advantages[~mask] == 0).all()
    if "per_sequence" in expected:
        rows = [[score] * mask.shape[1] for score in expected["per_sequence"]]
        rows = [
            [score if there else None for score, there in zip(row, here, strict=True)]
            for row, here in zip(rows, mask.tolist(), strict=True)
        ]
        return case.matches(advantages, rows)
    same = case.matches(advantages, expected["advantages"])
    return same and (returns is None or case.matches(returns, expected["returns"]))


def check_all(case: Any, table: dict[str, tuple[str, dict[str, Any]]], skip: tuple[str, ...] = ()) -> None:
    mask = case.mask()
    for theirs, expected in case.outputs.items():
        if theirs in skip:
            continue
        name, given = table[theirs]
        result = run(case, name, given, torch.ones(len(mask), dtype=torch.bool))
        assert agrees(case, result, expected, mask), theirs


@pytest.mark.golden("advantages.json")
def test_verl_advantages(case: Any) -> None:
    check_all(case, VERL)


@pytest.mark.golden("advantages.json", "fully_masked_row")
def test_an_empty_response_that_is_not_valid_leaves_the_statistics(case: Any) -> None:
    mask = case.mask()
    (accepted,) = case["also_accept"]
    for theirs, expected in accepted.items():
        name, given = VERL[theirs]
        assert agrees(case, run(case, name, given, mask.any(dim=1)), expected, mask), theirs


@pytest.mark.golden("advantages_skyrl.json")
def test_skyrl_advantages(case: Any) -> None:
    # SkyRL cuts the return at, and runs GAE over, tokens the policy did not sample; where there are none, all agree.
    mask = case.mask()
    has_holes = bool((mask[:, 1:] & ~mask[:, :-1]).any())
    check_all(case, SKYRL, skip=("reinforce++", "gae") if has_holes else ())


@pytest.mark.golden("whitening.json")
def test_masked_statistics(case: Any) -> None:
    values, mask = case.tensor("values"), case.mask()
    case.check(masked_mean(values, mask), case.outputs["masked_mean"])
    case.check(masked_variance(values, mask), case.outputs["masked_var"])
    case.check(whiten(values, mask), case.outputs["masked_whiten"])
    case.check(whiten(values, mask, keep_mean=True), case.outputs["masked_whiten_keep_mean"])
