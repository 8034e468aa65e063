"""``posttrain algorithms``: advantage estimators, policy losses, tuning methods and divergences, with formulas and settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from posttrain.errors import ConfigError, Problem, did_you_mean
from posttrain.registry import ADVANTAGES, DIVERGENCES, POLICY_LOSSES, TUNE_METHODS, Registry
from posttrain.settings import Setting

SECTIONS: dict[str, Registry[Any]] = {
    "advantage": ADVANTAGES,
    "loss": POLICY_LOSSES,
    "method": TUNE_METHODS,
    "distillation.divergence": DIVERGENCES,
}


def algorithms(
    name: Annotated[str | None, typer.Argument(help="One of them; by default all.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of docs/algorithms.md.")] = False,
) -> None:
    """List the advantage estimators, policy losses, tuning methods and divergences from teachers, or explain one."""
    if markdown:
        typer.echo("\n\n".join(f"### `{section}.*`\n\n{settings_table(section)}" for section in SECTIONS))
        return
    found = [
        (section, each) for section, registry in SECTIONS.items() for each in registry.names() if name in (None, each)
    ]
    if not found and name is not None:
        known = [each for registry in SECTIONS.values() for each in registry.names()]
        raise ConfigError(Problem(f"there is no algorithm called {name!r}", fix=did_you_mean(name, known)))
    for section, each in found:
        about = SECTIONS[section].describe(each)
        typer.echo(f"{section}.name={each}: {about.summary}")
        if name is not None:
            typer.echo(f"  source: {about.source}")
            for setting in about.settings.values():
                must = "must be given" if setting.required else f"default {value_text(setting.default)}"
                typer.echo(f"  {section}.{setting.name} ({setting_type(setting)}; {must}): {setting.meaning}")


def settings_table(section: str) -> str:
    """The settings of every algorithm of a section as a Markdown table."""
    rows = [row for name in SECTIONS[section].names() for row in settings_rows(section, name)]
    return "\n".join(["| name | setting | type | default | meaning |", "|---|---|---|---|---|", *rows])


def settings_rows(section: str, name: str) -> Iterator[str]:
    """The rows of one algorithm in ``settings_table``."""
    for setting in SECTIONS[section].settings(name).values():
        default = "must be given" if setting.required else f"`{value_text(setting.default)}`"
        kind = setting_type(setting).replace("|", "\\|")
        yield f"| `{name}` | `{section}.{setting.name}` | {kind} | {default} | {setting.meaning} |"


def setting_type(setting: Setting) -> str:
    """The type of a setting with its bounds: ``float, above 0``."""
    from posttrain.dialects.value_types import type_text

    field = setting.field()
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    bounds = [
        f"{word} {getattr(bound, key):g}"
        for bound in field.metadata
        for key, word in words.items()
        if getattr(bound, key, None) is not None
    ]
    return ", ".join([type_text(field.annotation), *bounds])


def value_text(value: Any) -> str:
    """A default as it is written in YAML."""
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
