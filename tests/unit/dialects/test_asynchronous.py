"""Asynchronous settings of the peers: what contradicts itself, and what a single device makes of them."""

from __future__ import annotations

import re

import pytest

from posttrain.dialects.here import at_hand

from .examples import read


@pytest.mark.parametrize(
    ("dialect", "given", "override", "said"),
    [
        ("verl", ("corrected",), "+trainer.v1.trainer_mode=colocate_asynch", "use colocate_async|colocate_async"),
        ("verl", ("colocate_async",), "+trainer.v1.sampler.max_off_policy_threshold=0", "counts 1"),
        ("verl", ("colocate_async",), "+trainer.v1.sampler.max_off_policy_strategy=skip", "known: drop, wait"),
        (
            "verl",
            ("separate_async",),
            "+trainer.v1.separate_async.parameter_sync_step=4",
            "use .*parameter_sync_step=2",
        ),
        ("verl", ("fully_async",), "data.train_batch_size=16", "with async_training, data.train_batch_size is 0"),
        ("verl", ("fully_async",), "++data.gen_batch_size=2", "data.gen_batch_size is 1, and it is 2"),
        ("verl", ("fully_async",), "actor_rollout_ref.hybrid_engine=True", "use actor_rollout_ref.hybrid_engine=False"),
        (
            "verl",
            ("fully_async",),
            "+async_training.staleness_threshold=-1",
            "use async_training.staleness_threshold=0",
        ),
        ("verl", ("fully_async",), "+async_training.require_batches=0", "use async_training.require_batches=1"),
        ("verl", ("fully_async",), "+rollout.total_rollout_steps=3", "a step takes 4"),
        (
            "verl",
            ("one_step_off",),
            "actor_rollout_ref.hybrid_engine=True",
            "use actor_rollout_ref.hybrid_engine=False",
        ),
        ("roll", ("is_weight",), "async_generation_ratio=-1", "async_generation_ratio is -1"),
        ("skyrl", ("fully_async",), "trainer.policy_mini_batch_size=4", "trainer.train_batch_size=8 is not"),
        ("skyrl", ("fully_async",), "trainer.placement.colocate_all=true", "samples on devices of its own"),
    ],
)
def test_a_contradiction_is_named(dialect: str, given: tuple[str, ...], override: str, said: str) -> None:
    found = [str(problem) for problem in read(dialect, "train", given, override).problems]
    assert any(re.search(said, text) for text in found), found


def test_the_agentic_pipeline_counts_whole_steps() -> None:
    found = read("roll", "train", ("agentic", "is_weight"), "async_generation_ratio=1.5").problems
    assert any("counts whole steps" in str(problem) for problem in found)


@pytest.mark.parametrize(
    ("dialect", "given", "override"),
    [
        ("roll", ("is_weight",), "async_generation_ratio=1"),
        ("skyrl", ("fully_async",), "trainer.fully_async.max_staleness_steps=1"),
    ],
)
def test_on_one_device_sampler_and_trainer_share_it(dialect: str, given: tuple[str, ...], override: str) -> None:
    config = read(dialect, "train", given, override).config
    assert config.asynchronous.mode == "separate"
    here, changes = at_hand(config)
    assert here.asynchronous.mode == "colocate" and here.asynchronous.max_staleness_steps == 1
    assert "asynchronous.mode: colocate instead of separate" in changes


def test_settings_of_a_mode_that_is_off_are_reported() -> None:
    found = read("skyrl", "train", (), "trainer.fully_async.max_staleness_steps=2")
    assert found.config.asynchronous.mode == "off" and not found.problems
    assert any("max_staleness_steps" in str(each) for each in found.ignored)


def test_the_fully_asynchronous_recipe_of_verl() -> None:
    """At most (1 + 0.1) x 4 steps' prompts are sampled between two weight syncs: 4 x 1.1 - 1 = 3.4 steps."""
    loaded = read("verl", "train", ("fully_async",), "+async_training.require_batches=2")
    assert loaded.problems == ()
    config, ahead = loaded.config, loaded.config.asynchronous
    assert (ahead.mode, ahead.max_staleness_steps, ahead.sync_every_steps) == ("separate", 3.4, 4)
    assert config.data.prompts_per_step == 8 and config.policy.sequences_per_mini_batch == 32
    assert (config.run.total_steps, config.validation.every_steps) == (100 // 8, 4)
    assert config.loss.rollout_correction.use_rollout_logprobs
    assert (config.policy.devices, config.rollout.devices) == ([0], [1])


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_the_later_loop_of_verl_as_its_own_scripts_start_it(mode: str) -> None:
    """Their data.gen_batch_size=1 is the rows that verl reads at a time, and none of them has weights."""
    apart = ("+actor_rollout_ref.rollout.nnodes=1", "+actor_rollout_ref.rollout.n_gpus_per_node=1")
    given = (f"+trainer.v1.trainer_mode={mode}", *(apart if mode == "separate_async" else ()))
    loaded = read("verl", "train", given, "+data.gen_batch_size=1")
    assert [str(problem) for problem in loaded.problems if "hands unfinished responses" not in str(problem)] == []
    config = loaded.config
    assert (config.asynchronous.max_staleness_steps, config.asynchronous.on_stale) == (7, "drop")
    assert (config.loss.rollout_correction.weights, config.loss.rollout_correction.weight_high) == ("token", 2.0)
    assert any("multiplied by trainer / sampler" in text for text in loaded.warnings)
    assert not any("gen_batch_size" in text for text in loaded.warnings)
    other = read("verl", "train", given, "+data.gen_batch_size=8")
    assert other.config == config and any("gen_batch_size=8 has no effect" in text for text in other.warnings)
    fresh = read("verl", "train", given, "+trainer.v1.sampler.max_off_policy_threshold=1")
    assert fresh.config.loss.rollout_correction.weights == "none" and fresh.config.asynchronous.max_staleness_steps == 0


@pytest.mark.parametrize(("backend", "cache"), [("vllm", "recompute"), ("native", "keep")])
def test_skyrl_keeps_a_cache_where_the_engine_has_one(backend: str, cache: str) -> None:
    clear = "trainer.fully_async.clear_kv_cache_on_weight_sync=false"
    loaded = read("skyrl", "train", ("fully_async",), f"generator.backend={backend}", clear)
    assert loaded.config.asynchronous.cache_on_new_weights == cache
    assert any("clear_kv_cache_on_weight_sync=false has no effect" in text for text in loaded.warnings) == (
        backend == "vllm"
    )
    assert not any("cannot keep the keys" in str(problem) for problem in loaded.problems)


def test_the_recipe_one_step_off_takes_its_own_file_s_correction() -> None:
    plain = ("+rollout.nnodes=1", "+rollout.n_gpus_per_node=1")
    loaded = read("verl", "train", plain, "actor_rollout_ref.hybrid_engine=False")
    assert loaded.problems == () and loaded.config.asynchronous.mode == "one_step"
    assert loaded.config.loss.rollout_correction.use_rollout_logprobs
    assert any("bypass_mode=True since verl 0.7" in said for said in loaded.warnings)


@pytest.mark.parametrize(
    ("given", "overrides", "mode"),
    [
        (
            ("one_step_off",),
            (
                "+algorithm.rollout_correction.rollout_rs=token_k1",
                "+algorithm.rollout_correction.rollout_rs_threshold=2.0",
            ),
            "one_step",
        ),
        (("fully_async",), ("+async_training.compute_prox_log_prob=True",), "separate"),
        (
            ("fully_async",),
            ("+async_training.compute_prox_log_prob=True", "++actor_rollout_ref.actor.use_rollout_log_probs=True"),
            "separate",
        ),
        (("fully_async",), ("+async_training.use_rollout_log_probs=False",), "separate"),
    ],
)
def test_verl_s_recipes_without_weights_get_them_and_a_warning(
    given: tuple[str, ...], overrides: tuple[str, ...], mode: str
) -> None:
    loaded = read("verl", "train", given, *overrides, "++algorithm.rollout_correction.bypass_mode=False")
    assert not any("takes responses as if the weights" in str(problem) for problem in loaded.problems)
    correction = loaded.config.loss.rollout_correction
    assert loaded.config.asynchronous.mode == mode
    assert (correction.weights, correction.weight_high, correction.use_rollout_logprobs) == ("token", 2.0, False)
    assert any("at most 2, as algorithm.rollout_correction.rollout_is=token does" in text for text in loaded.warnings)


@pytest.mark.parametrize(("ratio", "on_stale"), [("0", "wait"), ("1", "drop"), ("1.5", "wait")])
def test_additional_prompts_of_roll_take_what_is_complete_first(ratio: str, on_stale: str) -> None:
    loaded = read("roll", "train", ("apart",), f"async_generation_ratio={ratio}", "is_use_additional_prompts=true")
    assert loaded.config.asynchronous.on_stale == on_stale
    assert any("waits for slow prompts" in text for text in loaded.warnings) == (on_stale == "wait")


def test_roll_without_a_correction_gets_its_weights_and_a_warning() -> None:
    loaded = read("roll", "train", (), "async_generation_ratio=1")
    assert not any("takes responses as if the weights" in str(problem) for problem in loaded.problems)
    correction = loaded.config.loss.rollout_correction
    assert (correction.weights, correction.weight_high) == ("token", 1.2)
    assert any("at most 1.2, as train_infer_correction.is_weight.enabled=true does" in text for text in loaded.warnings)
    asked = read("roll", "train", ("is_weight",), "async_generation_ratio=1")
    assert not any("is_weight.enabled=true does" in text for text in asked.warnings)


def test_a_misspelled_key_of_asynchronous_training_is_corrected() -> None:
    (problem,) = read("skyrl", "train", ("fully_async",), "trainer.fully_async.max_stalness_steps=2").problems
    assert "did you mean trainer.fully_async.max_staleness_steps" in str(problem)
