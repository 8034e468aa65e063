"""Resuming with the settings of estimators and losses: a configuration holds those of the chosen ones alone."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from posttrain.config import RunConfig
from posttrain.dialects.native.write import to_yaml
from posttrain.run.config_change import changes, flat

NEEDED = {"model": {"path": "m"}, "data": {"train_files": ["a"]}}
# The sections as earlier versions wrote them: the settings of all, chosen or not.
ADVANTAGE = {
    "name": "grpo",
    "normalize_by_std": True,
    "lone_sample_keeps_reward": False,
    "gamma": 1.0,
    "gae_lambda": 1.0,
    "estimator_whitens": True,
    "whiten_rewards": False,
    "whiten": False,
    "clip": None,
    "terms": [],
    "term_weights": [],
    "step_gamma": 0.95,
    "episode_weight": 1.0,
    "step_weight": 1.0,
}
LOSS = {
    "name": "ppo_clip",
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "dual_clip": None,
    "gate_sharpness_positive": 1.0,
    "gate_sharpness_negative": 1.05,
    "covariance_share": 0.0002,
    "covariance_low": 1.0,
    "covariance_high": 5.0,
    "covariance_kl_coef": 1.0,
    "weight_limit": 20.0,
    "dro_beta": None,
    "drop_clipped": False,
    "positive_weight": 1.0,
    "negative_weight": 1.0,
    "aggregation": "token_mean",
}


def saved_by_an_earlier_version(**loss: Any) -> dict[str, Any]:
    tree = yaml.safe_load(to_yaml(RunConfig.model_validate(NEEDED)))
    return tree | {"advantage": dict(ADVANTAGE), "loss": {**LOSS, **loss}}


def test_settings_of_all_load_and_are_no_change() -> None:
    saved = saved_by_an_earlier_version()
    config = RunConfig.model_validate(saved)
    old = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "dual_clip": None}
    assert config.loss.settings == old | {"ratio_of": "token"}  # which came later
    assert not config.loss.unread and not config.advantage.unread
    assert config == RunConfig.model_validate(NEEDED | {"loss": {"clip_ratio_high": 0.28}})
    assert changes(flat(saved), yaml.safe_load(to_yaml(config))) == []


@pytest.mark.parametrize(("setting", "value"), [("clip_ratio_high", 0.3), ("covariance_low", 2.0)])
def test_a_setting_that_differs_is_a_change_whoever_reads_it(setting: str, value: float) -> None:
    saved = saved_by_an_earlier_version()
    now = RunConfig.model_validate(saved_by_an_earlier_version(**{setting: value}))
    [change] = changes(flat(saved), yaml.safe_load(to_yaml(now)))
    assert (change.field, change.before, change.now) == (f"loss.{setting}", LOSS[setting], value)


def test_another_loss_is_one_change() -> None:
    now = RunConfig.model_validate(NEEDED | {"loss": {"name": "gspo", "clip_ratio_high": 0.28}})
    assert [change.field for change in changes(flat(saved_by_an_earlier_version()), yaml.safe_load(to_yaml(now)))] == [
        "loss.name"
    ]
