"""Rules between the keys of the reward and of the group filter."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.plan.batch import plan_batches
from posttrain.plan.checks.train import check, warnings_of


def config(**sections: dict[str, Any]) -> RunConfig:
    base: dict[str, Any] = {"model": {"path": "m"}, "data": {"train_files": ["t.jsonl"]}}
    return RunConfig.model_validate(base | sections)


def problems(**sections: dict[str, Any]) -> list[tuple[str, str]]:
    return [(problem.field, str(problem)) for problem in check(config(**sections))]


TERM = {"name": "exact_match"}


@pytest.mark.parametrize(
    ("sections", "field", "text"),
    [
        ({"reward": {"terms": []}}, "reward.terms", "no reward term and no reward model"),
        (
            {"reward": {"model": {"path": "rm"}, "terms": [{"name": "model", "path": "f.py"}]}},
            "reward.terms",
            "is the name of the reward model's score",
        ),
        (
            {"reward": {"overlong_buffer_tokens": 257}},
            "reward.overlong_buffer_tokens",
            "is longer than the longest response of 256; use fewer, such as reward.overlong_buffer_tokens=64",
        ),
        (
            {"reward": {"normalize_mean": "group"}, "rollout": {"samples_per_prompt": 1}, "advantage": {"name": "gpg"}},
            "reward.normalize_mean",
            "makes every reward 0",
        ),
        (
            {"reward": {"normalize_std": "group"}, "rollout": {"samples_per_prompt": 1}, "advantage": {"name": "gpg"}},
            "reward.normalize_std",
            "makes every reward 0",
        ),
        ({"reward": {"terms": [{**TERM, "batched": True}]}}, "reward.terms.0.batched", "one response at a time"),
        (
            {"reward": {"judge": {"path": "j", "engine": "vlm"}}},
            "reward.judge.engine",
            "there is no sampler vlm for a judge (known: ",
        ),
        (
            {"reward": {"judge": {"path": "j"}, "terms": [{"name": "judge", "path": "f.py"}]}},
            "reward.terms",
            "is the name of the judge's verdict",
        ),
        (
            {"reward": {"more_judges": {"style": {"path": "j"}}, "terms": [{"name": "style", "path": "f.py"}]}},
            "reward.more_judges.style",
            "is the name of a judge's verdict; give the judge another name",
        ),
        (
            {"reward": {"more_judges": {"judge": {"path": "j"}}}},
            "reward.more_judges.judge",
            "which is the name of reward.judge",
        ),
        (
            {"reward": {"more_judges": {"model": {"path": "j"}}}},
            "reward.more_judges.model",
            "a judge cannot be called model",
        ),
        (
            {"group_filter": {"strategy": "drop", "above_mean": 0.5, "below_mean": 0.5}},
            "group_filter.above_mean",
            "no group has a mean above 0.5 and below 0.5",
        ),
        (
            {"group_filter": {"strategy": "refill", "metric": "exact_mach"}},
            "group_filter.metric",
            "did you mean exact_match?",
        ),
        (
            {"group_filter": {"strategy": "refill", "metric": "model"}},
            "group_filter.metric",
            "is no term of the reward",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(sections: dict[str, Any], field: str, text: str) -> None:
    found = [said for where, said in problems(**sections) if where == field]
    assert len(found) == 1 and text in found[0]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"reward": {"terms": [], "model": {"path": "rm"}}, "group_filter": {"strategy": "drop", "metric": "model"}},
        {"reward": {"terms": [TERM, TERM]}, "group_filter": {"strategy": "refill", "metric": "exact_match_2"}},
        {"group_filter": {"strategy": "replace", "metric": "exact_match/acc", "max_batches": 3, "min_kept_share": 0.3}},
        {"reward": {"overlong_buffer_tokens": 255, "overlong_penalty": 0.5, "clip": 3.0, "normalize_std": "running"}},
        {
            "reward": {"kl": {"coef": 0.1, "target": 0.1, "horizon_sequences": 5, "estimator": "k3"}},
            "reference": {"path": "r"},
        },
        {"advantage": {"name": "reinforce_plus_plus", "whiten_rewards": True}},
        {"reward": {"terms": [{"name": "f", "path": "f.py", "batched": True}], "workers": 2, "memory_gib": 0.5}},
    ],
)
def test_what_works_together_is_accepted_without_a_word(sections: dict[str, Any]) -> None:
    assert problems(**sections) == []
    assert warnings_of(config(**sections)) == []


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"reward": {"overlong_penalty": 2.0}}, "reward.overlong_penalty has no effect"),
        (
            {"reward": {"overlong_buffer_tokens": 8, "overlong_penalty": 0.0}},
            "reward.overlong_buffer_tokens has no effect",
        ),
        ({"reward": {"timeout_s": 5.0}}, "reward.timeout_s has no effect: these rewards are scored in the process"),
        ({"reward": {"workers": 2, "terms": [{"name": "llm_judge"}]}}, "reward.workers has no effect"),
        ({"reward": {"kl": {"target": 0.1}}}, "reward.kl.target has no effect: reward.kl.coef is 0"),
        ({"reward": {"kl": {"estimator": "k3"}}}, "reward.kl.estimator has no effect"),
        ({"reward": {"kl": {"coef": 0.1, "horizon_sequences": 5}}}, "reward.kl.horizon_sequences has no effect"),
        ({"reward": {"kl": {"coef": 0.1, "estimator": "k3+"}}}, "the + of reward.kl.estimator=k3+ has no effect"),
        (
            {"reward": {"normalize_mean": "group", "normalize_std": "batch"}},
            "reward.normalize_mean and reward.normalize_std have no effect: grpo",
        ),
        (
            {"advantage": {"whiten_rewards": True}},
            "advantage.whiten_rewards has no effect: grpo reads no token rewards",
        ),
        ({"group_filter": {"below_mean": 0.9}}, "group_filter.below_mean has no effect: group_filter.strategy is none"),
        ({"group_filter": {"above_std": None}}, "group_filter.above_std has no effect: group_filter.strategy is none"),
        ({"group_filter": {"strategy": "drop", "max_batches": 2}}, "group_filter.max_batches has no effect"),
        ({"group_filter": {"strategy": "refill", "min_kept_share": 0.2}}, "group_filter.min_kept_share has no effect"),
        ({"group_filter": {"strategy": "drop", "above_std": None}}, "asks nothing of a group but one valid reward"),
        (
            {
                "group_filter": {"strategy": "drop"},
                "rollout": {"samples_per_prompt": 1},
                "advantage": {"name": "reinforce_plus_plus"},
            },
            "group_filter.above_std has no effect: with 1 sample per prompt",
        ),
        ({"reference": {"path": "r"}}, "reference.path has no effect: loss.kl_coef and reward.kl.coef are 0"),
    ],
)
def test_what_has_no_effect_is_told(sections: dict[str, Any], text: str) -> None:
    assert [said for said in warnings_of(config(**sections)) if said.startswith(text) or text in said] != []


def test_normalisation_is_not_called_useless_where_a_clip_or_a_kl_follows() -> None:
    for extra in ({"clip": 2.0}, {"kl": {"coef": 0.1}}):
        assert warnings_of(config(reward={"normalize_mean": "group", **extra})) == []


def test_prefer_chooses_among_the_batches_of_a_synchronous_step() -> None:
    chosen = {"group_filter": {"strategy": "prefer", "oversample": 2, "above_std": None, "below_tokens": 9}}
    assert check(config(**chosen)) == [] and warnings_of(config(**chosen)) == []
    domains = {"a": {"sources": ["a"], "prompts_per_step": 8}}
    others: list[tuple[dict[str, Any], str]] = [
        ({"asynchronous": {"mode": "one_step"}}, "asynchronous.mode=one_step"),
        ({"data": {"train_files": ["x"], "domains": domains}}, "data.domains"),
    ]
    for more, cause in others:
        problems = [each for each in check(config(**chosen, **more)) if each.field == "group_filter.strategy"]
        assert len(problems) == 1 and cause in problems[0].what
    plan, [problem] = plan_batches(config(**chosen), 15)  # 8 prompts x 2
    assert plan is None and problem.field == "group_filter.oversample"
    assert problem.fix == "use group_filter.oversample=1, or more prompts"
    plan, _ = plan_batches(config(**chosen), 35)
    assert plan is not None and plan.steps_per_epoch == 2
    assert "group_filter.oversample has no effect" in warnings_of(config(group_filter={"oversample": 2}))[0]
