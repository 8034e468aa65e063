"""The settings in which runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Return (setting, its value in each configuration as JSON, None where it is missing) for the settings that differ, in the
    order of the configurations. Lists are compared as a whole."""
    flat = [_flat(config) for config in configs]
    names = list(dict.fromkeys(name for config in flat for name in config))
    rows = [(name, [config.get(name) for config in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return found
