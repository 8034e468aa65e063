"""Advantage estimators that a program of SkyRL registers: found by its command, and run as they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from posttrain.algos.verl.functions import load
from posttrain.cli.request import load_request
from posttrain.config.roles import needs_values
from posttrain.dialects.scripts.own_programs import started_by
from posttrain.registry import ADVANTAGES

PROGRAM = """
import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp, validate_cfg
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, register_advantage_estimator

def minus_the_mean(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index, **kwargs):
    rewards = (token_level_rewards * response_mask).sum(dim=-1, keepdim=True)
    advantages = (rewards - rewards.mean()) * response_mask
    return advantages, advantages.clone()

AdvantageEstimatorRegistry.register("simple_baseline", minus_the_mean)

@register_advantage_estimator("scaled")
def scaled(token_level_rewards, response_mask, gamma, **kwargs):
    return token_level_rewards * gamma, token_level_rewards

@register_advantage_estimator("lost")
def lost(token_level_rewards, **kwargs):
    return BasePPOExp(token_level_rewards)

class Mine(BasePPOExp):
    pass
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "examples" / "mine" / "main_mine.py"
    file.parent.mkdir(parents=True)
    file.write_text(PROGRAM)
    return file


def added(name: str, root: Path) -> tuple[str, ...]:
    words = ["python", "-m", "examples.mine.main_mine", f"trainer.algorithm.advantage_estimator={name}"]
    started = started_by(words, [root])
    assert started is not None and started[1].dialect == "skyrl"
    return started[1].adds


def test_the_command_s_estimator_is_that_of_its_program(program: Path, tmp_path: Path) -> None:
    assert added("grpo", tmp_path) == ()
    (path,) = added("scaled", tmp_path)
    keys = ["trainer.algorithm.advantage_estimator=scaled", "trainer.algorithm.gamma=0.5", path]
    loaded = load_request([*keys, "data.train_data=[a.parquet]"], "skyrl", here=True, skip_files=True)
    assert not [each for each in loaded.problems if "estimator" in str(each)]
    advantage = loaded.config.advantage
    assert (advantage.name, advantage.path) == ("scaled", str(program))
    assert advantage.settings["gamma"] == 0.5
    assert any(f"scaled is yours: scaled of {program}, line 15" in each for each in loaded.warnings)


def test_it_computes_what_it_says(program: Path) -> None:
    described = ADVANTAGES.written_for_verl("simple_baseline", str(program))
    assert described is not None
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    ours = {
        "token_rewards": torch.tensor([[0.0, 3.0], [1.0, 7.0], [9.0, 9.0]]),
        "response_mask": mask,
        "group_index": torch.tensor([0, 0, 0]),
        "valid": torch.tensor([True, True, False]),
    }
    estimator = load(str(program), "simple_baseline")
    advantages, _ = estimator(*(ours[name] for name in described.our_inputs))
    # Rewards 3 and 1, mean 2; what is behind the mask and the invalid row are not seen
    assert advantages.tolist() == [[1.0, 1.0], [-1.0, 0.0], [0.0, 0.0]]
    assert not [name for name in sys.modules if name.partition(".")[0] in ("skyrl", "skyrl_train")]


def test_one_that_needs_skyrl_itself_says_so(program: Path) -> None:
    rewards, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    described = ADVANTAGES.written_for_verl("lost", str(program))
    assert described is not None
    ours = {"token_rewards": rewards, "response_mask": mask, "valid": torch.tensor([True])}
    with pytest.raises(Exception, match=r"main_base\.BasePPOExp is SkyRL's, which is not called here"):
        load(str(program), "lost")(*(ours[name] for name in described.our_inputs))


@pytest.mark.parametrize("parameter", ["values", "values=None"])
def test_one_that_takes_values_has_a_critic_where_one_is_named(parameter: str, tmp_path: Path) -> None:
    """As SkyRL hands over ``values`` in any case: None without ``critic.model.path``."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator\n\n"
        "@register_advantage_estimator('mine')\n"
        f"def mine(token_level_rewards, response_mask, {parameter}, **kwargs):\n"
        "    found = token_level_rewards - (0 if values is None else values)\n"
        "    return found, token_level_rewards\n"
    )
    keys = ["data.train_data=[a.parquet]", "trainer.policy.model.path=m", f"++posttrain.advantage.path={file}"]
    keys.append("trainer.algorithm.advantage_estimator=mine")
    for critic, has_one in (("null", False), ("m", True)):
        loaded = load_request([*keys, f"trainer.critic.model.path={critic}"], "skyrl", here=True, skip_files=True)
        assert not [each for each in loaded.problems if "critic" in each.field]
        assert needs_values(loaded.config) is has_one
    described, estimator = ADVANTAGES.describe("mine", str(file)), load(str(file), "mine")
    ours = {
        "token_rewards": torch.tensor([[3.0]]),
        "response_mask": torch.tensor([[True]]),
        "valid": torch.tensor([True]),
    }
    for values, expected in ((None, 3.0), (torch.tensor([[1.0]]), 2.0)):
        advantages, _ = estimator(*((ours | {"values": values})[name] for name in described.inputs))
        assert advantages.tolist() == [[expected]]


LOSSES = """
import torch
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.ppo_utils import PolicyLossRegistry
from losses_of_mine import compute_bare

def compute_reinforce_policy_loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return (-log_probs * advantages).mean() * config.own_factor, 0.0

PolicyLossRegistry.register("reinforce", compute_reinforce_policy_loss)
PolicyLossRegistry.register("bare", compute_bare)
"""
BARE = """
from skyrl_train.utils.ppo_utils import apply_off_policy_correction, reduce_loss, register_policy_loss

@register_policy_loss("bare")
def compute_bare(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs=None):
    loss, mask, _ = apply_off_policy_correction(-log_probs * advantages, old_log_probs, rollout_logprobs, loss_mask, config)
    return reduce_loss(loss, mask), {}
"""
KEYS = [
    "data.train_data=[a.parquet]", "environment.env_class=gsm8k", "trainer.policy.model.path=a/model",
    "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
]  # fmt: skip


@pytest.mark.parametrize("key", ["policy_loss_type", "ppo_loss_type"])
def test_a_loss_of_the_program_is_read_with_its_keys(key: str, tmp_path: Path) -> None:
    """Also where the folder that the module names is called otherwise, as in SkyRL's own example."""
    folder = tmp_path / "examples/losses"
    folder.mkdir(parents=True)
    (folder / "main_mine.py").write_text(LOSSES)
    (folder / "losses_of_mine.py").write_text(BARE)
    words = ["uv", "run", "-m", "examples.loss.main_mine", f"trainer.algorithm.{key}='reinforce'"]
    started = started_by(words, [tmp_path, folder, folder.parent])
    assert started is not None and started[1].adds == (f"++posttrain.loss.path='{folder}/main_mine.py'",)
    given = [*KEYS, f"trainer.algorithm.{key}=reinforce", "+trainer.algorithm.own_factor=0.5", *started[1].adds]
    loaded = load_request(given, "skyrl", here=True, skip_files=True)
    assert not [text for text in map(str, loaded.problems) if "loss" in text or "own_factor" in text]
    assert loaded.config.loss.settings["config"] == {"own_factor": 0.5, "loss_reduction": "token_mean"}
    # It does not call SkyRL's correction, which is a part of SkyRL's own losses
    assert loaded.config.loss.rollout_correction.weights == "none"
    assert any("reinforce is yours, and does not call apply_off" in str(each) for each in loaded.ignored)


def test_a_loss_of_a_file_that_the_program_imports(tmp_path: Path) -> None:
    (tmp_path / "main_mine.py").write_text(LOSSES)
    (tmp_path / "losses_of_mine.py").write_text(BARE)
    started = started_by(["python", "main_mine.py", "trainer.algorithm.policy_loss_type=bare"], [tmp_path])
    assert started is not None and started[1].adds == (f"++posttrain.loss.path='{tmp_path}/losses_of_mine.py'",)
    given = [*KEYS, "trainer.algorithm.policy_loss_type=bare", *started[1].adds]
    config = load_request(given, "skyrl", here=True, skip_files=True).config
    assert (config.loss.name, config.loss.rollout_correction.weights) == ("bare", "token")


def test_names_that_are_built_in_are_not_looked_for(tmp_path: Path) -> None:
    text = LOSSES + "\nPolicyLossRegistry.register('gspo', compute_reinforce_policy_loss)\n"
    (tmp_path / "main_mine.py").write_text(text)
    started = started_by(["python", "main_mine.py", "trainer.algorithm.policy_loss_type=gspo"], [tmp_path])
    assert started is not None and started[1].adds == ()
