"""The plan of an entry without derived values: the complete configuration and the remarks on it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from posttrain.cli.verdict import verdict
from posttrain.config.shown import shown
from posttrain.dialects.loaded import Ignored, LoadedConfig


def check_request(loaded: LoadedConfig[Any], *, look_at_files: bool, to_run: bool = False) -> LoadedConfig[Any]:
    """Return the request unchanged. Raises: ConfigError with all problems."""
    return loaded.runnable() if to_run else loaded.checked()


def plan_text(loaded: LoadedConfig[Any]) -> str:
    """Format the complete configuration as YAML, then the remarks."""
    from posttrain.dialects.native.write import to_yaml

    return "\n\n".join([to_yaml(loaded.config).rstrip(), *closing(loaded)])


def plan_json(loaded: LoadedConfig[Any]) -> str:
    return json.dumps(document(loaded, {}), indent=2)


def document(loaded: LoadedConfig[Any], derived: dict[str, Any]) -> dict[str, Any]:
    """Return a plan of any entry for programs: {dialect, entry, config, derived, ignored, unsupported, warnings, trains, verdict,
    needs}."""
    return {
        "dialect": loaded.dialect,
        "entry": loaded.entry,
        "config": shown(loaded.config),
        "derived": derived,
        "ignored": [asdict(one) for one in loaded.ignored],
        "unsupported": [
            {"key": problem.field, "reason": problem.what, "where": problem.where, "fix": problem.fix}
            for problem in loaded.unsupported
        ],
        "warnings": [*loaded.changes, *loaded.warnings],
        **verdict(loaded, derived.get("world_size")).for_programs(),
    }


def closing(loaded: LoadedConfig[Any]) -> list[str]:
    """Return the remarks as the last paragraph of a plan; none where there is nothing to remark."""
    said = remarks(loaded)
    return ["\n".join(said)] if said else []


def remarks(loaded: LoadedConfig[Any]) -> list[str]:
    """List what is changed, ignored, or without effect, one per line."""
    if loaded.dialect == "native" and not (loaded.changes or loaded.ignored or loaded.warnings):
        return []
    shown = [one for one in loaded.ignored if one.asks]
    quiet = len(loaded.ignored) - len(shown)
    more = [f"ignored: {quiet} more keys that are written with their default value"] if quiet else []
    return [
        *(f"here: {change}" for change in loaded.changes),
        *(_ignored_text(group) for group in _by_section(shown)),
        *more,
        *(f"warning: {warning}" for warning in loaded.warnings),
    ]


def _by_section(ignored: Iterable[Ignored]) -> Iterable[list[Ignored]]:
    """Group keys of one section that are ignored for one reason; a group stands where its first key does."""
    groups: dict[tuple[str, str], list[Ignored]] = {}
    for one in ignored:
        groups.setdefault((one.key.rpartition(".")[0], one.reason), []).append(one)
    return groups.values()


def _ignored_text(group: Sequence[Ignored]) -> str:
    """Return the line of one key, with its place, or of several, by their names in the section."""
    first = group[0]
    if len(group) == 1:
        return f"ignored: {first.key}, at {first.where}: {first.reason}"
    names = ", ".join(one.key.rpartition(".")[2] for one in group)
    return f"ignored: {first.key.rpartition('.')[0]}.{{{names}}}: {first.reason}"
