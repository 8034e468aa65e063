"""Rules between domains and the sizes, files and length of a run."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.errors import Problem


def domain_problems(config: RunConfig) -> Iterator[Problem]:
    """Report domains that do not make up a step."""
    data = config.data
    if not data.domains:
        return
    parts = {name: domain.prompts_per_step for name, domain in data.domains.items()}
    if sum(parts.values()) != data.prompts_per_step:
        added = " + ".join(f"{count} ({name})" for name, count in parts.items())
        yield Problem(
            f"the domains draw {added} = {sum(parts.values())} prompts, and a step has {data.prompts_per_step}",
            fix=f"use data.prompts_per_step={sum(parts.values())}, or other parts",
            field="data.prompts_per_step",
        )
    owners: dict[str, str] = {}
    for name, domain in data.domains.items():
        for source in domain.sources:
            other = owners.setdefault(source, name)
            if other != name:
                yield Problem(
                    f"the data source {source} is in the domains {other} and {name}",
                    fix="leave it in one of them",
                    field=f"data.domains.{name}.sources",
                )
    if config.environment.train_episodes is not None:
        yield Problem(
            "generated episodes have shares of their own (environment.named.NAME.weight), and data.domains has others",
            fix="remove data.domains",
            field="data.domains",
        )
    if config.run.total_steps is None:
        yield Problem(
            "domains begin their epochs one by one, so that a run of them has no common number of epochs",
            fix="say how long it is in steps, such as run.total_steps=1000",
            field="run.total_steps",
        )


def domain_warnings(config: RunConfig) -> Iterator[str]:
    """Report settings of domains that have no effect, in sentences."""
    if config.data.domain_statistics and not config.data.domains:
        yield "data.domain_statistics has no effect: data.domains names none"
