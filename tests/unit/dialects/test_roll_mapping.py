"""What several of ROLL's keys decide together; single keys are tested by the examples of their rows."""

from __future__ import annotations

import pytest

from posttrain.dialects.loaded import LoadedConfig

from . import examples

CONFIG = "strategy_args.strategy_config"


def read(*overrides: str) -> LoadedConfig:
    loaded = examples.read("roll", "train", (), *overrides)
    assert not loaded.problems, [str(problem) for problem in loaded.problems]
    return loaded


def test_inverse_sqrt_falls_as_slowly_as_transformers_has_it() -> None:
    """Its timescale is the warm-up's steps, and 10,000 without a warm-up."""
    slow = ("actor_train.training_args.lr_scheduler_type=inverse_sqrt",)
    assert read(*slow).config.policy.schedule.timescale_updates == 10_000
    for warmup in ("warmup_steps=5", "warmup_ratio=0.1"):
        assert read(*slow, f"actor_train.training_args.{warmup}").config.policy.schedule.timescale_updates is None


def test_the_options_of_an_engine_that_is_not_chosen_are_told() -> None:
    key = f"actor_train.{CONFIG}.recompute_num_layers"
    loaded = read("actor_train.device_mapping=[0,1]", f"{key}=2")
    assert {one.key: one.reason for one in loaded.ignored}[key] == "megatron reads it, and this is fsdp2_train"
    assert loaded.config.policy.engine_options == {}


@pytest.mark.parametrize("name", ["gpu_memory_utilisation", "gpu_memory_utilisatoin"])
def test_a_misspelt_option_is_handed_on_with_one_question(name: str) -> None:
    key = f"actor_infer.{CONFIG}.{name}"
    loaded = read("actor_infer.strategy_args.strategy_name=vllm", f"{key}=0.5")
    assert loaded.config.rollout.engine_options == {name: 0.5}
    [warning] = [text for text in loaded.warnings if key in text]
    assert f"did you mean actor_infer.{CONFIG}.gpu_memory_utilization?" in warning
