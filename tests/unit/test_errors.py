"""Names that were probably meant."""

from __future__ import annotations

import pytest

from posttrain.errors import did_you_mean, nearest


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("ppo", ["dppo_tv", "dppo_kl", "ppo_clip"], "ppo_clip"),  # it begins so; dppo_kl only looks alike
        ("clip", ["clip_cov", "ppo_clip"], "clip_cov"),
        ("grop", ["gpg", "grpo"], "grpo"),
        ("a", ["alpha", "beta"], None),  # one letter is no beginning
        ("wandb", ["console", "jsonl"], None),
    ],
)
def test_nearest(name: str, known: list[str], meant: str | None) -> None:
    assert nearest(name, known) == meant


def test_names_are_listed_once() -> None:
    assert did_you_mean("wandb", ["jsonl", "console"]) == "known: console, jsonl"
    assert did_you_mean("wandb", ["jsonl", "console"], listed=True) == ""
    assert did_you_mean("consle", ["jsonl", "console"], listed=True) == "did you mean console?"
