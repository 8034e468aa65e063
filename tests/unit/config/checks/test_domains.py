"""Rules between domains and the sizes, files and length of a run."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.plan.checks.train import check, warnings_of

DOMAINS = {"a": {"sources": ["x"], "prompts_per_step": 6}, "b": {"sources": ["y", "z"], "prompts_per_step": 2}}


def config(run: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    files = {"train_files": ["t.jsonl"], "prompts_per_step": 8}
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "data": files | data, "run": {"total_steps": 3} if run is None else run}
    )


def test_domains_that_make_up_a_step_are_right() -> None:
    assert check(config(domains=DOMAINS)) == []


@pytest.mark.parametrize(
    ("made", "field", "text"),
    [
        (
            config(domains=DOMAINS, prompts_per_step=16),
            "data.prompts_per_step",
            "the domains draw 6 (a) + 2 (b) = 8 prompts, and a step has 16; use data.prompts_per_step=8",
        ),
        (
            config(domains=DOMAINS | {"b": {"sources": ["x"], "prompts_per_step": 2}}),
            "data.domains.b.sources",
            "the data source x is in the domains a and b",
        ),
        (config({}, domains=DOMAINS), "run.total_steps", "such as run.total_steps=1000"),
        (
            config(
                domains=DOMAINS | {"b": {**DOMAINS["b"], "group_filter": {"strategy": "refill", "metric": "formmat"}}}
            ),
            "data.domains.b.group_filter.metric",
            "the group filter looks at formmat",
        ),
    ],
)
def test_domains_that_cannot_be(made: RunConfig, field: str, text: str) -> None:
    [problem] = check(made)
    assert problem.field == field and text in str(problem)


def test_settings_without_domains_are_told() -> None:
    assert "data.domain_statistics has no effect: data.domains names none" in warnings_of(
        config(domain_statistics=True)
    )
