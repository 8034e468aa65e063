"""A sampler's share of the memory, and how many sequences it decodes at a time: one meaning in every dialect."""

from __future__ import annotations

import pytest

from posttrain.dialects.detect import read_config

VERL = ["actor_rollout_ref.model.path=m", "data.train_files=[a.parquet]", "data.val_files=[a.parquet]"]
SKYRL = ["trainer.policy.model.path=m", "data.train_data=[a.parquet]"]
NATIVE = ["model.path=m", "data.train_files=[a.parquet]"]


@pytest.mark.parametrize("share", ["1.7", "0", "-0.5", "true"])
@pytest.mark.parametrize(
    ("dialect", "given", "key"),
    [
        ("native", [*NATIVE, "rollout.engine=vllm"], "rollout.engine_options.gpu_memory_utilization"),
        ("native", [*NATIVE, "rollout.engine=sglang"], "rollout.engine_options.mem_fraction_static"),
        ("verl", VERL, "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("verl", [*VERL, "actor_rollout_ref.rollout.name=hf"], "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("verl@0.2", VERL, "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("skyrl", SKYRL, "generator.gpu_memory_utilization"),
        ("skyrl", SKYRL, "generator.inference_engine.gpu_memory_utilization"),
        ("roll", [], "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"),
    ],
)
def test_a_share_of_memory_is_above_0_and_at_most_1(dialect: str, given: list[str], key: str, share: str) -> None:
    found = [
        str(problem)
        for problem in read_config(None, [*given, f"{key}={share}"], dialect).problems
        if key in str(problem)
    ]
    (problem,) = found
    assert "above 0 and at most 1" in problem


@pytest.mark.parametrize(
    ("dialect", "given", "key"),
    [
        ("verl", [*VERL, "actor_rollout_ref.rollout.name=hf"], "actor_rollout_ref.rollout.max_num_seqs"),
        ("verl", VERL, "actor_rollout_ref.rollout.max_num_seqs"),
        ("skyrl", SKYRL, "generator.max_num_seqs"),
    ],
)
def test_sequences_decoded_at_a_time(dialect: str, given: list[str], key: str) -> None:
    loaded = read_config(None, [*given, f"{key}=33"], dialect)
    assert loaded.config.rollout.max_concurrent_sequences == 33
    assert key not in [ignored.key for ignored in loaded.ignored]


def test_the_default_of_a_server_takes_no_memory_elsewhere() -> None:
    """1024 sequences are vLLM's business; the native engine would hold a cache for each."""
    for engine, expected in (("vllm", 1024), ("hf", 256)):
        loaded = read_config(None, [*VERL, f"actor_rollout_ref.rollout.name={engine}"], "verl")
        assert loaded.config.rollout.max_concurrent_sequences == expected
