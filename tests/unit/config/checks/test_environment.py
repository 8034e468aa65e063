"""Rules about environments, and what a run with them has instead of the usual defaults."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.plan.checks.train import check, warnings_of


def a_run(environment: dict[str, Any], **sections: Any) -> RunConfig:
    values = {"model": {"path": "m"}, "data": {"train_files": ["a.parquet"]}, **sections, "environment": environment}
    return RunConfig.model_validate(values)


def told(config: RunConfig) -> list[str]:
    return [f"{problem.field}: {problem.what}" for problem in check(config)]


def test_environments_give_the_rewards_and_get_whole_rows() -> None:
    config = a_run({"name": "single_turn"})
    assert [term.name for term in config.reward.terms] == ["exact_match"]  # it gives no reward
    config = a_run({"name": "my.worlds:Maze"})
    assert config.reward.terms == [] and config.data.extra_columns == ["*"]
    assert told(config) == []
    own = a_run({"named": {"maze": {"name": "m:M"}}}, reward={"terms": [{"name": "gsm8k"}]},
                data={"train_files": ["a"], "extra_columns": ["x"]})  # fmt: skip
    assert [term.name for term in own.reward.terms] == ["gsm8k"] and own.data.extra_columns == ["x"]
    without = a_run({})
    assert [term.name for term in without.reward.terms] == ["exact_match"] and without.data.extra_columns == []


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"name": "sinlge_turn"}, "environment.name: there is no environment called 'sinlge_turn'"),
        ({"named": {"a": {"name": "nowhere"}}}, "environment.named.a.name: there is no environment called 'nowhere'"),
        ({"name": "worlds.py:"}, "environment.name: worlds.py: is no environment"),
        ({"name": "m:M", "train_episodes": 4}, "environment.train_episodes: train prompts are to come from files and"),
        (
            {"name": "agent", "settings": {"function": "a.py:b"}, "workers": 0},
            "environment.workers: an agent runs in a process",
        ),
        (
            {"name": "agent", "settings": {"functoin": "a.py:b"}},
            "environment.settings.functoin: the environment agent has no",
        ),
        ({"validation_episodes": 4}, "environment.validation_episodes: environment.validation_episodes generates"),
        (
            {"name": "open", "settings": {"scored_by": "juge"}, "named": {"judge": {"name": "a.py:B"}}},
            "environment.settings.scored_by: conversations are to be scored by 'juge', and environment.named has judge",
        ),
        (
            {"name": "open", "named": {"one": {"name": "single_turn"}}},
            "environment.named.one.name: single_turn gives no reward",
        ),
        ({"name": "open", "named": {"one": {"name": "open"}}}, "environment.named: open is the environment of a whole"),
    ],
)
def test_what_is_refused(environment: dict[str, Any], said: str) -> None:
    assert any(text.startswith(said) for text in told(a_run(environment))), told(a_run(environment))


def test_episodes_fit_into_micro_batches() -> None:
    budget = {"policy": {"max_tokens_per_micro_batch": 1000}, "rollout": {"max_response_tokens": 100}}
    said = "policy.max_tokens_per_micro_batch: episodes may have"
    assert not any(text.startswith(said) for text in told(a_run({"name": "m:M", "max_context_tokens": 900}, **budget)))
    for longest in (901, None):
        assert any(
            text.startswith(said) for text in told(a_run({"name": "m:M", "max_context_tokens": longest}, **budget))
        )
    assert not any(text.startswith(said) for text in told(a_run({"name": "single_turn"}, **budget)))


def test_a_limit_of_whole_sequences() -> None:
    budget = {"policy": {"max_tokens_per_micro_batch": 1000}, "rollout": {"max_response_tokens": 100}}
    said = "policy.max_tokens_per_micro_batch: episodes may have 1001 tokens"
    assert any(text.startswith(said) for text in told(a_run({"name": "m:M", "max_sequence_tokens": 1001}, **budget)))
    fits = a_run({"name": "m:M", "max_sequence_tokens": 1000, "max_context_tokens": 999}, **budget)
    assert not any(text.startswith("policy.max_tokens") for text in told(fits))
    assert fits.context_tokens == 900  # with a turn of 100 behind them, 1000
    assert (
        a_run({"name": "m:M", "max_sequence_tokens": 1000, "max_context_tokens": 700}, **budget).context_tokens == 700
    )
    none = a_run({"name": "m:M", "max_sequence_tokens": 1000, "max_context_tokens": 900}, **budget)
    assert any(text.startswith("environment.max_sequence_tokens has no effect") for text in warnings_of(none))


def test_a_server_is_told_how_long_conversations_become() -> None:
    said = "environment.max_context_tokens: vllm must know"
    vllm = {"rollout": {"engine": "vllm"}}
    assert any(text.startswith(said) for text in told(a_run({"name": "m:M"}, **vllm)))
    longer = a_run({"name": "m:M", "max_context_tokens": 2000}, **vllm)
    assert not any(text.startswith(said) for text in told(longer))
    assert longer.context_tokens == 2000  # more than data.max_prompt_tokens, 512
    assert a_run({"max_context_tokens": 2000}).context_tokens == 512  # without an environment it has no effect


def test_the_overlong_rule_is_about_one_turn() -> None:
    problems = told(a_run({"name": "m:M"}, reward={"overlong_buffer_tokens": 10}))
    assert any(text.startswith("reward.overlong_buffer_tokens: the overlong rule") for text in problems)


def test_generated_episodes_need_no_file() -> None:
    config = a_run({"name": "m:M", "train_episodes": 4}, data={"train_files": []})
    assert told(config) == []
    assert told(a_run({}, data={"train_files": []})) == ["data.train_files: there is no training file"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"max_turns": 3, "workers": 2}, "environment.max_turns, environment.workers have no effect"),
        ({"name": "m:M", "workers": 0, "timeout_s": 5.0}, "environment.timeout_s has no effect"),
        ({"name": "m:M", "end_at_max_turns": False}, "environment.end_at_max_turns has no effect"),
        ({"name": "m:M", "conversation": "one_message", "close_turns": False}, "environment.close_turns has no effect"),
        ({"name": "single_turn", "max_turns": 4}, "environment.max_turns has no effect"),
        ({"named": {"a": {"name": "m:M"}}, "settings": {"x": 1}}, "environment.settings has no effect"),
    ],
)
def test_what_has_no_effect(environment: dict[str, Any], said: str) -> None:
    assert any(text.startswith(said) for text in warnings_of(a_run(environment)))


def test_nothing_is_told_where_all_is_well() -> None:
    usual = a_run({"name": "m:M", "max_turns": 3, "timeout_s": 5.0})
    assert not [text for text in warnings_of(usual) if text.startswith("environment")]
