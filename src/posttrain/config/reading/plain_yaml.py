"""YAML as OmegaConf reads it (``1e-6`` is a number, a date is a text), without OmegaConf where a document holds plain values.

Importing OmegaConf takes longer than reading most configurations.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from posttrain.config.reading.plain_references import is_plain

FLOAT = "tag:yaml.org,2002:float"
TIMESTAMP = "tag:yaml.org,2002:timestamp"
# Numbers with an exponent, whose sign and decimal point may be missing; YAML 1.1 wants both
_EXPONENT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):
    """OmegaConf's choice of which texts are numbers."""


_Loader.add_implicit_resolver(FLOAT, _EXPONENT, list("-+0123456789"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, text) for tag, text in rules if tag != TIMESTAMP]
    for first, rules in _Loader.yaml_implicit_resolvers.items()
}


def plain_yaml(text: str) -> dict[str, Any] | None:
    """The values of a document; None for one that OmegaConf must read or refuse: broken YAML, keys that are no text, values of
    other types, and ``${...}`` besides plain references."""
    try:
        values = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return None
    return _unshared(values) if isinstance(values, dict) and is_plain(values) else None


def _unshared(value: Any) -> Any:
    """Copy a value, so that what an alias (``*name``) repeats is a value of its own at each place."""
    if isinstance(value, dict):
        return {name: _unshared(inner) for name, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value
