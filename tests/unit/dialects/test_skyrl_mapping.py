"""What several of SkyRL's keys decide together; single keys are tested by the examples of their rows."""

from __future__ import annotations

from posttrain.config import RunConfig
from posttrain.dialects.loaded import LoadedConfig

from . import examples

AL = "trainer.algorithm"


def read(given: tuple[str, ...], *overrides: str) -> LoadedConfig:
    return examples.read("skyrl", "train", given, *overrides)


def test_the_trees_of_deepspeed_reach_policy_critic_and_reference() -> None:
    """deepspeed_config.train is the policy's and the critic's, .eval the reference's."""
    changed = ("deepspeed_config.train.prescale_gradient=true", "deepspeed_config.eval.wall_clock_breakdown=true")
    config = read(("ppo", "kl", "deepspeed"), *changed).config
    for role in (config.policy, config.critic):
        assert role.engine_options["prescale_gradient"] is True
        assert role.engine_options["wall_clock_breakdown"] is False
    assert config.reference.engine_options["wall_clock_breakdown"] is True
    assert "gradient_clipping" not in config.policy.engine_options  # max_grad_norm says it


def test_the_base_leaves_roles_it_does_without_at_our_defaults() -> None:
    config, plain = read(()).config, RunConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": ["a"]}})
    assert config.critic == plain.critic
    assert config.reward.kl == plain.reward.kl
    assert config.loss.kl_coef == 0
    assert config.loss.kl_estimator == plain.loss.kl_estimator
    assert config.loss.rollout_correction == plain.loss.rollout_correction
    assert config.group_filter == plain.group_filter
    assert config.reference.engine_options == config.policy.engine_options == config.rollout.engine_options == {}
    assert (config.policy.engine, config.rollout.engine) == ("local", "native")
    assert config.validation.max_response_tokens is None
    assert config.policy.schedule == plain.policy.schedule


def test_what_holds_whatever_is_written() -> None:
    config = read(("ppo",), f"{AL}.loss_reduction=token_mean").config
    assert config.data.overlong_prompts == "filter"
    assert config.critic.aggregation == "sequence_mean_token_mean"  # SkyRL's value loss, whatever loss_reduction says
    assert config.loss.aggregation == "token_mean"
