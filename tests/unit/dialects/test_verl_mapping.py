"""What several of verl's keys decide together; single keys are tested by the examples of their rows."""

from __future__ import annotations

from pathlib import Path

from posttrain.config import RunConfig
from posttrain.dialects.loaded import LoadedConfig

from . import examples

R = "actor_rollout_ref.rollout"
T = f"{R}.multi_turn"
TOOL_FILE = f"{T}.tool_config_path={Path(__file__).parent}/verl_documents/tools.yaml"
TURNS = (f"{T}.enable=True", TOOL_FILE)
VLLM = (f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=1")


def read(*overrides: str) -> LoadedConfig:
    return examples.read("verl", "train", (), *overrides)


def test_the_base_leaves_roles_it_does_without_at_our_defaults() -> None:
    config, plain = read().config, RunConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": ["a"]}})
    assert config.critic == plain.critic
    assert config.reward.kl == plain.reward.kl
    assert config.reward.model is None
    assert config.loss.kl_coef == 0
    assert config.loss.kl_estimator == plain.loss.kl_estimator
    assert config.reference.engine_options == {}
    assert config.validation.max_response_tokens is None


def test_with_mode_async_rows_name_their_agent() -> None:
    loaded = read(f"{R}.mode=async", TOOL_FILE)
    environment = loaded.config.environment
    assert (environment.column, environment.name) == ("agent_name", "single_turn")
    assert {tag: one.name for tag, one in environment.named.items()} == {
        "single_turn_agent": "single_turn",
        "tool_agent": "tools",
    }
    assert environment.named["tool_agent"].settings["cut"] == "middle"
    assert loaded.config.data.extra_columns == ["agent_name"]
    assert any("as in verl; +" in text for text in loaded.warnings)
    assert not read(f"{R}.mode=async").config.environment.used


def test_the_whole_sequence_is_what_verl_gives_the_sampler() -> None:
    """max_model_len, where it is given; and a conversation goes on behind what the model has read."""
    environment = read(*TURNS, *VLLM, f"{R}.max_model_len=900", f"{R}.max_num_batched_tokens=1024").config.environment
    assert (environment.max_sequence_tokens, environment.changed_history) == (900, "append")
