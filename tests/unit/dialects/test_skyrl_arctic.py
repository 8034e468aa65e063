"""SkyRL's integration of Arctic's server: one update of the whole step, by the engines here."""

from __future__ import annotations

import pytest

from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.skyrl import DIALECT

ARCTIC = "trainer.override_entrypoint=integrations.arctic_rl.entrypoint"
# The sizes of SkyRL's integrations/arctic_rl/examples/run_gsm8k_grpo_4gpu.sh
GSM8K = (
    *("data.train_data=[train.parquet]", "data.val_data=[val.parquet]", "trainer.logger=console"),
    *("trainer.train_batch_size=256", "trainer.policy_mini_batch_size=4", "generator.n_samples_per_prompt=4"),
    *("trainer.algorithm.use_kl_loss=false", "trainer.placement.policy_num_gpus_per_node=2"),
    *("generator.num_inference_engines=1", "generator.inference_engine_tensor_parallel_size=1", "generator.backend=vllm"),
)  # fmt: skip


def read(*overrides: str) -> LoadedConfig:
    return read_dialect(DIALECT, None, [*GSM8K, *overrides])


def test_a_step_is_one_update_on_devices_beside_the_samplers() -> None:
    """256 prompts x 4 samples = 1024 sequences; SkyRL's own loop would make 64 updates of 16."""
    loaded = read(ARCTIC)
    assert loaded.problems == ()
    policy = loaded.config.policy
    assert policy.sequences_per_mini_batch == 1024
    assert (policy.devices, loaded.config.rollout.devices) == ([0, 1], [2])
    assert read("trainer.placement.colocate_all=false").config.policy.sequences_per_mini_batch == 16
    assert [one.reason for one in loaded.ignored if one.key == "trainer.policy_mini_batch_size"] == [
        "Arctic's program has one update made of the whole step"
    ]


def test_its_own_keys_take_the_place_of_skyrls() -> None:
    """A share of 0.05 of the horizon of 1000 updates, whatever the run's length; clipped PPO over the tokens of a step."""
    loaded = read(
        ARCTIC,
        "trainer.arctic_rl.lr_warmup_ratio=0.05",
        "trainer.arctic_rl.optimizer_betas=[0.9,0.95]",
        "trainer.policy.optimizer_config.adam_betas=[0.8,0.8]",
        "trainer.policy.optimizer_config.num_warmup_steps=7",
        "trainer.algorithm.loss_reduction=sequence_mean",
        "trainer.algorithm.ppo_loss_type=gspo",
    )
    config = loaded.config
    assert (config.policy.schedule.name, config.policy.schedule.warmup_updates) == ("constant", 50)
    assert config.policy.optimizer.betas == (0.9, 0.95)
    assert (config.loss.name, config.loss.aggregation) == ("ppo_clip", "token_mean")
    told = {one.key for one in loaded.ignored}
    assert {"trainer.policy.optimizer_config.adam_betas", "trainer.algorithm.loss_reduction"} < told
    assert {"trainer.policy.optimizer_config.num_warmup_steps", "trainer.algorithm.ppo_loss_type"} < told


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.update_epochs_per_batch=2", "Arctic's program makes one epoch of a step"),
        ("trainer.algorithm.use_kl_loss=true", "Arctic's program has no reference"),
        ("trainer.algorithm.advantage_estimator=gae", "Arctic's program has no critic"),
        ("trainer.arctic_rl.lr_scheduler_type=cosine", "Arctic's server alone knows others than constant"),
    ],
)
def test_what_its_program_stops_at_is_refused(override: str, said: str) -> None:
    key = override.partition("=")[0]
    [problem] = [one for one in read(ARCTIC, override).problems if one.field == key]
    assert said in problem.what


def test_another_program_is_refused_and_nothing_reads_arctics_keys_then() -> None:
    loaded = read("trainer.override_entrypoint=my.trainer", "trainer.arctic_rl.colocate=true")
    assert [one.refused for one in loaded.problems if one.field == "trainer.override_entrypoint"] == [True]
    assert "trainer.arctic_rl.colocate" in {one.key for one in loaded.ignored}
    assert "trainer.arctic_rl.colocate" in {one.key for one in read("trainer.arctic_rl.colocate=true").ignored}


def test_a_slip_among_its_keys_is_named() -> None:
    told = [text for text in read(ARCTIC, "trainer.arctic_rl.zero_stge=2").warnings if "zero_stge is not known" in text]
    assert len(told) == 1 and told[0].endswith("did you mean trainer.arctic_rl.zero_stage?")
