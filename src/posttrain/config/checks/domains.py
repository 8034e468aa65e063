"""Rules between domains and the sizes, files and length of a run."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RunConfig
from posttrain.errors import Problem, did_you_mean


def domain_problems(config: RunConfig) -> Iterator[Problem]:
    """Report domains that do not make up a step."""
    data = config.data
    yield from _curriculum_problems(config)
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
        for source in [source for source in owners if source not in config.environment.named]:
            known = ", ".join(config.environment.named) or "none"
            what = f"generated episodes have the names in environment.named as data sources ({known}), not {source}"
            yield Problem(
                what,
                fix=did_you_mean(source, config.environment.named) or "use names of environment.named",
                field=f"data.domains.{owners[source]}.sources",
            )
    if config.run.total_steps is None:
        yield Problem(
            "domains begin their epochs one by one, so that a run of them has no common number of epochs",
            fix="say how long it is in steps, such as run.total_steps=1000",
            field="run.total_steps",
        )


def _curriculum_problems(config: RunConfig) -> Iterator[Problem]:
    data, field = config.data, "data.curriculum"
    if data.curriculum is None:
        return
    if data.domains or data.sampler_class_file is not None:
        other = "data.domains" if data.domains else "data.sampler_class_file"
        yield Problem(
            f"data.curriculum and {other} would both choose the rows of a step", fix="use one of them", field=field
        )
    if config.asynchronous.mode != "off":
        mode = config.asynchronous.mode
        what = f"a curriculum looks at every step before it draws the next, and asynchronous.mode {mode} draws ahead"
        yield Problem(what, fix="use asynchronous.mode=off, or remove data.curriculum", field=field)
    if config.run.total_steps is None:
        what = "the sources of a curriculum begin their epochs one by one, so that a run has no common number of epochs"
        yield Problem(what, fix="say how long it is in steps, such as run.total_steps=1000", field="run.total_steps")
    if data.curriculum.least_share > data.curriculum.most_share:
        what = f"least_share is {data.curriculum.least_share:g} and most_share is {data.curriculum.most_share:g}"
        yield Problem(what, fix="use a most_share that is not below least_share", field=f"{field}.least_share")


def domain_warnings(config: RunConfig) -> Iterator[str]:
    """Report settings of domains that have no effect, in sentences."""
    if config.data.domain_statistics and not config.data.domains:
        yield "data.domain_statistics has no effect: data.domains names none"
