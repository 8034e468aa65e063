"""Asynchronous runs that contradict themselves get one error each, with the fix."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from posttrain.config import RunConfig
from posttrain.config.asynchronous import AsynchronousConfig
from posttrain.config.checks.asynchronous import (
    asynchronous_problems,
    asynchronous_warnings,
)

TOKEN = {"rollout_correction": {"weights": "token"}}


def config(asynchronous: dict[str, Any], **sections: Any) -> RunConfig:
    sections = {"loss": TOKEN} | sections
    return RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["a.jsonl"], "prompts_per_step": 4},
            "asynchronous": asynchronous,
            **sections,
        }
    )


def problems(asynchronous: dict[str, Any], **sections: Any) -> list[str]:
    return [f"{each.what}; {each.fix}" for each in asynchronous_problems(config(asynchronous, **sections))]


@pytest.mark.parametrize(
    "asynchronous",
    [
        {"mode": "one_step"},
        {"mode": "colocate"},
        {"mode": "colocate", "max_staleness_steps": 0},
        {"mode": "colocate", "max_staleness_steps": 3, "max_running_groups": 4, "on_stale": "drop"},
        {"mode": "colocate", "max_staleness_steps": 3, "max_running_groups": 16},
        {"mode": "off", "max_running_groups": 1000},
    ],
)
def test_what_goes_together(asynchronous: dict[str, Any]) -> None:
    assert problems(asynchronous) == []


@pytest.mark.parametrize(
    "sections",
    [
        {"placement": {"runtime": "ray"}},
        {"placement": {"devices": 2}},
        {"placement": {"devices": 4}, "policy": {"devices": [0, 1]}, "rollout": {"devices": [0, 1]}},
    ],
)
def test_colocate_with_workers_samples_where_the_policy_is(sections: dict[str, Any]) -> None:
    assert problems({"mode": "colocate"}, **sections) == []
    assert problems({"mode": "colocate", "cache_on_new_weights": "keep"}, **sections) == []


def test_episodes_that_begin_again_are_announced() -> None:
    assert problems({"mode": "colocate"}, environment={"name": "guess_number"}) == []
    [said] = asynchronous_warnings(config({"mode": "colocate"}, environment={"name": "guess_number"}))
    assert "the others begin again" in said


@pytest.mark.parametrize(
    ("asynchronous", "sections", "said"),
    [
        ({"mode": "one_step", "max_staleness_steps": 2}, {}, "max_staleness_steps=1, or asynchronous.mode=colocate"),
        ({"mode": "one_step", "max_staleness_steps": 0}, {}, "max_staleness_steps=1, or asynchronous.mode=off"),
        ({"mode": "one_step", "on_stale": "drop"}, {}, "asynchronous.on_stale = drop has no meaning in one_step"),
        ({"mode": "one_step", "max_running_groups": 4}, {}, "use asynchronous.max_running_groups=null"),
        ({"mode": "colocate", "max_running_groups": 3}, {}, "is outside of 4 to 8.*max_running_groups=4, or"),
        ({"mode": "colocate", "max_running_groups": 9}, {}, r"no more than 4 x \(1 \+ 1\).*max_running_groups=8, or"),
        (
            {"mode": "colocate", "max_staleness_steps": 1.5, "on_stale": "drop"},
            {},
            "limits the oldest groups of a step, which drop does not choose; use asynchronous.max_staleness_steps=2, or",
        ),
        (
            {"mode": "colocate", "prepared_groups": 8},
            {},
            "starts environments ahead.*; use asynchronous.mode=colocate and environment.workers above 0, or",
        ),
        (
            {"mode": "one_step", "cache_on_new_weights": "keep"},
            {},
            "has no meaning in one_step.*; use asynchronous.cache_on_new_weights=recompute, or asynchronous.mode=colocate",
        ),
        (
            {"mode": "colocate", "cache_on_new_weights": "keep"},
            {"rollout": {"routing_replay": True}},
            "needs the experts of every token",
        ),
        ({"mode": "colocate"}, {"rollout": {"engine": "hf"}}, "which hf cannot continue; use rollout.engine=native"),
        (
            {"mode": "colocate"},
            {"placement": {"devices": 2}, "policy": {"devices": [0]}, "rollout": {"devices": [1]}},
            r"placed on \[1\]; use rollout.devices=\[0\], or asynchronous.mode=separate with devices",
        ),
        (
            {"mode": "colocate"},
            {"placement": {"devices": 2}, "rollout": {"engine": "vllm"}},
            "which vllm cannot continue.*use rollout.engine=native",
        ),
        (
            {"mode": "colocate", "prepared_groups": 2},
            {
                "environment": {"name": "nim", "workers": 2},
                "data": {
                    "train_files": ["a.jsonl"],
                    "prompts_per_step": 4,
                    "domains": {n: {"sources": [n], "prompts_per_step": 2} for n in ("a", "b")},
                },
            },
            "with data.domains each domain admits its own; use asynchronous.prepared_groups=0",
        ),
        ({"mode": "one_step"}, {"advantage": {"name": "remax"}}, "remax compares rewards with that of a greedy"),
        ({"mode": "one_step"}, {"loss": {}}, "may be 1 step older; use .*weights=token .*use_rollout_logprobs=true"),
        ({"mode": "colocate", "max_staleness_steps": 3}, {"loss": {}}, "may be 3 steps older"),
        (
            {"mode": "one_step"},
            {"loss": {"name": "gpg", "rollout_correction": {"use_rollout_logprobs": True}}},
            r"gpg takes responses as if.*weights=token \(the ratio stays that to the start of the step: decoupled PPO\)$",
        ),
    ],
)
def test_what_does_not(asynchronous: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    [found] = problems(asynchronous, **sections)
    assert re.search(said, found), found


@pytest.mark.parametrize(
    ("loss", "corrected"),
    [
        ({}, False),
        (TOKEN, True),
        ({"rollout_correction": {"use_rollout_logprobs": True}}, True),
        ({"name": "rollout_is"}, True),
        ({"name": "gpg", "rollout_correction": {"use_rollout_logprobs": True}}, False),
        ({"name": "gpg", "rollout_correction": {"weights": "sequence"}}, True),
        ({"rollout_correction": {"reject": ["token_k1"], "reject_bounds": ["2"]}}, False),
    ],
)
def test_losses_that_know_who_sampled(loss: dict[str, Any], corrected: bool) -> None:
    assert config({"mode": "one_step"}, loss=loss).loss.corrects_for_sampler is corrected
    assert bool(problems({"mode": "one_step"}, loss=loss)) is not corrected


def test_without_staleness_any_loss_will_do() -> None:
    assert problems({"mode": "colocate", "max_staleness_steps": 0}, loss={}) == []


APART: dict[str, Any] = {
    "placement": {"devices": 3},
    "policy": {"devices": [0]},
    "rollout": {"devices": [1, 2]},
}


@pytest.mark.parametrize(
    ("asynchronous", "sections"),
    [
        ({"mode": "separate"}, APART),
        ({"mode": "separate", "cache_on_new_weights": "keep"}, APART),
        ({"mode": "separate", "max_staleness_steps": 3, "sync_every_steps": 4}, APART),
        ({"mode": "separate", "max_staleness_steps": 1.5, "sync_every_steps": 2}, APART),
        ({"mode": "separate"}, {"rollout": {"engine": "vllm", "endpoints": ["http://127.0.0.1:1"]}}),
    ],
)
def test_samplers_that_are_apart(asynchronous: dict[str, Any], sections: dict[str, Any]) -> None:
    assert problems(asynchronous, **sections) == []


@pytest.mark.parametrize(
    ("asynchronous", "sections", "said"),
    [
        ({"mode": "separate"}, {}, r"native reads the trainer's; use placement.devices=2 policy.devices=\[0\]"),
        (
            {"mode": "separate"},
            {"placement": {"devices": 4}},
            r"placed on devices 0 to 3; use policy.devices=\[0, 1\] rollout.devices=\[2, 3\], or asynchronous.mode=one_step",
        ),
        ({"mode": "separate"}, APART | {"rollout": {"devices": [0, 2]}}, "both are placed on device 0;"),
        (
            {"mode": "separate", "max_staleness_steps": 2, "sync_every_steps": 4},
            APART,
            "weights of 3 steps before.*use asynchronous.sync_every_steps=3, or asynchronous.max_staleness_steps=3",
        ),
        ({"mode": "separate", "max_staleness_steps": 1.5, "sync_every_steps": 3}, APART, "sync_every_steps=2, or"),
        ({"mode": "colocate", "sync_between_tokens": False}, {}, "is for separate, and the mode is colocate"),
        ({"mode": "colocate", "sync_every_steps": 2}, {}, "colocate gives the sampler new weights after every step"),
        ({"mode": "separate", "max_running_groups": 3}, APART, "is outside of 4 to 8"),
        (
            {"mode": "separate", "sync_between_tokens": False, "cache_on_new_weights": "keep"},
            APART,
            "keep has no meaning with asynchronous.sync_between_tokens = false",
        ),
        ({"mode": "separate"}, APART | {"loss": {}}, "may be 1 step older"),
    ],
)
def test_what_separate_cannot_be(asynchronous: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    [found] = problems(asynchronous, **sections)
    assert re.search(said, found), found


def test_engines_that_finish_responses_first_are_named() -> None:
    [said] = asynchronous_warnings(
        config({"mode": "separate"}, **(APART | {"rollout": {"engine": "hf", "devices": [1]}}))
    )
    assert said.startswith("hf cannot continue a response under new weights")
    assert not [*asynchronous_warnings(config({"mode": "separate"}, **APART))]


def test_settings_without_effect_are_reported() -> None:
    [said] = asynchronous_warnings(config({"max_staleness_steps": 2, "on_stale": "drop"}))
    assert said.startswith("asynchronous.max_staleness_steps, asynchronous.on_stale have no effect")
    [said] = asynchronous_warnings(config({"mode": "colocate", "max_staleness_steps": 0, "on_stale": "drop"}))
    assert "on_stale has no effect" in said
    [said] = asynchronous_warnings(config({"mode": "colocate", "max_staleness_steps": 1.1}))
    assert said.endswith("max_staleness_steps=1.1 is the same as 1: 0.1 of a step's 4 prompts is less than one group")
    assert not [*asynchronous_warnings(config({"mode": "colocate", "max_staleness_steps": 1.25}))]


@pytest.mark.parametrize("steps", [1e300, 10**300, 1_000_001])
def test_a_bound_that_no_run_reaches_is_one_error(steps: float) -> None:
    with pytest.raises(ValidationError) as caught:
        AsynchronousConfig(max_staleness_steps=steps)
    [problem] = caught.value.errors()
    assert problem["type"] == "less_than_equal" and problem["ctx"] == {"le": 1_000_000}


def test_whole_steps_are_whole_however_they_are_written() -> None:
    found = [AsynchronousConfig(max_staleness_steps=steps).max_staleness_steps for steps in (2.0, 2, 1.5, 0.0)]
    assert list(map(repr, found)) == ["2", "2", "1.5", "0"]
