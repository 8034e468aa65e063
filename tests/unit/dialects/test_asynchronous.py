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
