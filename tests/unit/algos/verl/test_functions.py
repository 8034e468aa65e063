"""Estimators and losses written for verl, in our calling convention."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from posttrain.algos.advantages.grpo import grpo
from posttrain.algos.losses.ppo_clip import ppo_clip
from posttrain.config import RunConfig
from posttrain.config.algorithm import RolloutCorrectionConfig
from posttrain.errors import RequestError
from posttrain.plan.checks.names import name_problems
from posttrain.registry import ADVANTAGES, POLICY_LOSSES
from posttrain.verl_functions import find

NO_WEIGHTS = RolloutCorrectionConfig()
ESTIMATOR = """
from collections import defaultdict
from enum import Enum

import torch
import verl.utils.torch_functional as verl_F
from verl.trainer.ppo.core_algos import register_adv_est


class Mine(str, Enum):
    SHIFTED = "shifted"


@register_adv_est(Mine.SHIFTED)
def center_on_prompt(token_level_rewards, response_mask, index, config=None, **kwargs):
    scores = token_level_rewards.sum(dim=-1)
    rows = defaultdict(list)
    for row, group in enumerate(index):
        rows[group].append(scores[row])
    means = torch.stack([torch.stack(rows[group]).mean() for group in index])
    advantages = (scores - means).unsqueeze(-1) * response_mask + config.algorithm_shift
    return advantages, advantages


def compute_whitened_outcome_advantage(
    token_level_rewards: torch.Tensor, eos_mask: torch.Tensor, gamma: torch.Tensor, power: float
):
    scores = token_level_rewards.sum(dim=-1, keepdim=True) ** power * eos_mask * gamma
    return verl_F.masked_whiten(scores, eos_mask), scores


def compute_lost_advantage(token_level_rewards, certainty: torch.Tensor, response_mask):
    return certainty, certainty
"""
LOSS = """
import torch
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss


@register_policy_loss("plain")
def plain(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    assert rollout_is_weights is None
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/ratio": (ratio * response_mask).sum() / response_mask.sum()}


@register_policy_loss("summed_up")
def summed_up(old_log_prob, log_prob, advantages, response_mask):
    return -(advantages * log_prob * response_mask).sum() / response_mask.sum(), torch.tensor(0.5), 0.25, 0.0


@register_policy_loss("by_sequence")
def by_sequence(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean"):
    return agg_loss(loss_mat=-advantages * log_prob, loss_mask=response_mask, loss_agg_mode="seq-mean-token-mean"), {}
"""
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "for_verl.py").write_text(ESTIMATOR + LOSS)
    return str(tmp_path / "for_verl.py")


def test_a_function_is_found_by_the_name_it_is_registered_under() -> None:
    tree = ast.parse(ESTIMATOR + LOSS)

    def called(name: str) -> str | None:
        found = find(tree, name)
        return found.definition.name if found else None

    assert called("shifted") == called("center_on_prompt") == "center_on_prompt"
    assert called("whitened") == "compute_whitened_outcome_advantage"
    assert called("plain") == "plain" and called("other") is None


def test_a_call_registers_as_well() -> None:
    """SkyRL's registries are given a name and a function."""
    text = "AdvantageEstimatorRegistry.register('lone', over_all)\n"
    tree = ast.parse("def over_all(token_level_rewards, response_mask, index): ...\n" + text)
    found = find(tree, "lone")
    assert found is not None and found.definition.name == "over_all" and find(tree, "other") is None


def test_its_inputs_and_settings_are_read_from_the_source(file: str) -> None:
    about = ADVANTAGES.describe("shifted", file)
    assert about.inputs == ("token_rewards", "response_mask", "group_index", "valid") and list(about.settings) == [
        "config"
    ]
    assert about.facts.compares_responses
    whitened = ADVANTAGES.describe("whitened", file)
    assert (whitened.settings["gamma"].default, whitened.settings["power"].required) == (1.0, True)
    assert not whitened.facts.compares_responses
    lost = ADVANTAGES.written_for_verl("lost", file)
    assert lost is not None and lost.unknown == ["certainty"]
    assert POLICY_LOSSES.describe("plain", file).inputs == ("old_logprobs", "policy_logprobs", "advantages", "mask")


def test_an_estimator_sees_the_valid_rows_alone(file: str) -> None:
    nan = float("nan")
    rewards = torch.tensor([[0.0, 1.0, nan], [0, 0, 3.0], [9.0, 0, 0], [0, 2.0, nan]])
    groups, valid = torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, False, True])
    estimator = ADVANTAGES.get("shifted", file)
    advantages, returns = estimator(rewards, MASK, groups, valid, config={"algorithm_shift": 0.5})
    # group 0: scores 1 and 3, mean 2; the third row is invalid; group 1 is alone
    expected = torch.tensor([[-0.5, -0.5, 0], [1.5, 1.5, 1.5], [0, 0, 0], [0.5, 0.5, 0]])
    assert torch.equal(advantages, expected) and torch.equal(returns, expected)


COLUMNS = """
import numpy as np
import torch


def compute_by_domain_advantage(token_level_rewards, response_mask, index, domains: np.ndarray[str], ages):
    scores = token_level_rewards.sum(dim=-1)
    known = {"sums": 1.0, "words": 2.0}
    factors = torch.tensor([known[domain] + age for domain, age in zip(domains, ages)])
    advantages = (scores * factors).unsqueeze(-1) * response_mask
    return advantages, advantages


def compute_lost_advantage(token_level_rewards, response_mask, certainty: torch.Tensor):
    return certainty, certainty
"""
TRAINER = """
def compute_advantage(data, adv_estimator):
    if adv_estimator == "by_domain":
        found = data.non_tensor_batch["dataset"]
        advantages, returns = core_algos.compute_by_domain_advantage(
            token_level_rewards=data.batch["token_level_rewards"], domains=found, ages=data.non_tensor_batch.get("age", [])
        )
    else:
        core_algos.compute_lost_advantage(token_level_rewards=1, certainty=data.batch["certainty"])
"""


def test_columns_that_a_forks_trainer_hands_over_are_inputs(tmp_path: Path) -> None:
    (tmp_path / "core_algos.py").write_text(COLUMNS)
    file = str(tmp_path / "core_algos.py")
    without = ADVANTAGES.written_for_verl("by_domain", file)
    assert without is not None and without.unknown == ["domains"] and without.settings["ages"].required
    (tmp_path / "ray_trainer.py").write_text(TRAINER)
    found = ADVANTAGES.written_for_verl("by_domain", file)
    assert found is not None and not found.unknown and not found.settings and found.columns == ["dataset", "age"]
    lost = ADVANTAGES.written_for_verl("lost", file)
    assert lost is not None and lost.unknown == ["certainty"]
    rewards = torch.where(MASK & (MASK.cumsum(1) == 1), torch.tensor([[1.0], [2.0], [3.0], [4.0]]), 0.0)
    given = {"token_rewards": rewards, "response_mask": MASK, "group_index": torch.tensor([0, 0, 0, 1])}
    given |= {"column:dataset": ("sums", "words", "nobody's", "words"), "column:age": (0, 3, 9, 1)}
    given["valid"] = torch.tensor([True, True, False, True])  # the third row is not shown, whose domain has no factor
    advantages, _ = ADVANTAGES.get("by_domain", file)(*(given[name] for name in found.our_inputs))
    # 1 x (1 + 0), 2 x (2 + 3), nothing, 4 x (2 + 1)
    assert advantages[:, 0].tolist() == [1, 10, 0, 12] and not advantages[~MASK].any()


def test_statistics_of_verl_are_there(file: str) -> None:
    rewards = torch.where(MASK & (MASK.cumsum(1) == 1), torch.tensor([[1.0], [2.0], [3.0], [4.0]]), 0.0)
    advantages, returns = ADVANTAGES.get("whitened", file)(
        rewards, MASK, torch.ones(4, dtype=torch.bool), gamma=1.0, power=2
    )
    # squares 1 (2 tokens), 4 (3), 9, 16 (2): sum 55, mean 55/8 = 6.875, sample variance 264.875/7 = 37.8393
    assert returns[1, 2] == 4 and advantages[0, 0] == pytest.approx((1 - 6.875) / 37.83929**0.5, rel=1e-5)
    assert advantages[MASK].mean() == pytest.approx(0, abs=1e-6) and not advantages[~MASK].any()


def test_a_loss_is_the_same_for_every_cut(file: str) -> None:
    torch.manual_seed(0)
    policy, old, advantages = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)
    settings = {"config": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}}
    plain = POLICY_LOSSES.get("plain", file)
    losses, report = plain(old, policy, advantages, MASK, **settings)
    expected, _ = ppo_clip(policy, old, advantages, MASK, clip_ratio_low=0.2, clip_ratio_high=0.3)
    torch.testing.assert_close(losses, expected)
    parts = torch.cat(
        [plain(old[rows], policy[rows], advantages[rows], MASK[rows], **settings)[0] for rows in ([0], [1, 2], [3])]
    )
    torch.testing.assert_close(parts, losses)
    ratio = torch.exp(policy - old)[MASK].mean()
    assert report["ratio"][MASK].mean() == pytest.approx(float(ratio)) and not report["ratio"][~MASK].any()


def test_a_mean_of_its_own_is_a_mean_over_tokens(file: str) -> None:
    policy = torch.arange(12.0).reshape(4, 3).requires_grad_()
    advantages = torch.ones(4, 3)
    losses, report = POLICY_LOSSES.get("summed_up", file)(torch.zeros(4, 3), policy, advantages, MASK)
    # log-probs 0, 1, 3, 4, 5, 6, 9, 10 sum to 38 over 8 tokens
    assert losses.sum() / MASK.sum() == -38 / 8
    losses.sum().backward()
    assert policy.grad is not None and torch.equal(policy.grad, -MASK.float())
    assert report["clip_fraction"][0, 0] == 0.5 and report["kl_old"][0, 0] == 0.25


def test_what_cannot_be_kept_is_one_error(file: str) -> None:
    zeros = torch.zeros(4, 3)
    with pytest.raises(RequestError, match=r"aggregates by seq-mean-token-mean.*loss_agg_mode=seq-mean-token-mean"):
        POLICY_LOSSES.get("by_sequence", file)(zeros, zeros, zeros, MASK)
    with pytest.raises(RequestError, match=r"for_verl.py:\d+: center_on_prompt failed: .*algorithm_shift"):
        ADVANTAGES.get("shifted", file)(
            zeros, MASK, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool), config={}
        )


def test_verls_own_estimator_is_ours() -> None:
    from posttrain.algos.verl.core_algos import compute_grpo_outcome_advantage

    rewards = torch.where(MASK & (MASK.cumsum(1) == 1), torch.tensor([[1.0], [2.0], [3.0], [4.0]]), 0.0)
    groups = torch.tensor([0, 0, 1, 1])
    theirs, _ = compute_grpo_outcome_advantage(rewards, MASK.float(), groups.numpy())
    ours = grpo(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4, dtype=torch.bool), groups, MASK)
    assert torch.equal(theirs, ours)


def test_a_file_with_many_functions_is_walked_once(monkeypatch):
    """A fork's core_algos.py has dozens; a walk for each took seconds."""
    from posttrain import verl_functions

    one = "def compute_f{n}_advantage(token_level_rewards, response_mask, index):\n    return token_level_rewards, index\n"
    tree = ast.parse("".join(one.format(n=number) for number in range(40)))
    walked = []
    walk = ast.walk
    monkeypatch.setattr(verl_functions.ast, "walk", lambda node: walked.append(node is tree) or walk(node))
    assert verl_functions.find(tree, "f7").definition.name == "compute_f7_advantage"
    assert verl_functions.find(tree, "f7") is not None and sum(walked) <= 3


@pytest.mark.parametrize(
    ("use", "line"),
    [
        ("if rollout_is_weights is not None:\n        loss = loss * rollout_is_weights.detach()", 0),
        ("loss *= rollout_is_weights", 0),
        ("loss = loss * rollout_is_weights.clamp(max=2.0)", 7),
        ("loss = loss * torch.log1p(rollout_is_weights)", 7),
        ("loss = loss / rollout_is_weights", 7),
        ("if rollout_is_weights is not None and rollout_is_weights.max() > 2:\n        loss = loss * 0", 7),
    ],
)
def test_a_loss_that_weighs_otherwise_than_by_a_factor_is_refused(tmp_path: Path, use: str, line: int) -> None:
    file = tmp_path / "losses.py"
    file.write_text(
        "import torch\nfrom verl.trainer.ppo.core_algos import register_policy_loss\n@register_policy_loss('mine')\n"
        "def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode='token-mean', config=None,\n"
        "         rollout_is_weights=None):\n    loss = -advantages * (log_prob - old_log_prob).exp()\n"
        f"    {use}\n    return loss.mean(), 0.0, 0.0, 0.0\n"
    )
    loss = {"name": "mine", "path": str(file), "rollout_correction": {"weights": "token"}}
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": []}, "loss": loss})
    said = [problem for problem in name_problems(config) if "rollout correction" in problem.what]
    assert [f"line {line} of {file}" in problem.what for problem in said] == ([True] if line else [])
    without = config.model_copy(update={"loss": config.loss.model_copy(update={"rollout_correction": NO_WEIGHTS})})
    assert not [problem for problem in name_problems(without) if "rollout correction" in problem.what]
