"""Names that the user's own modules register (``model.external_modules``): known before a dialect's rules look at names."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import Key, Ledger
from posttrain.dialects.trees import value_at
from posttrain.dialects.words import OUR_SECTION
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, Registry, plug_in

_FIELD = "model.external_modules"
_REGISTRIES: dict[str, Registry[Any]] = {"advantage.name": ADVANTAGES, "loss.name": POLICY_LOSSES}


def plug_in_named(ledger: Ledger, values: dict[str, Any]) -> None:
    """Make the names known that the modules of a configuration register, whatever key names these. Nothing is imported."""
    keys = [row.name for row in ledger.rows if _FIELD in row.fields] + [f"{OUR_SECTION}.{_FIELD}"]
    for key in keys:
        found = value_at(values, key)
        modules = found if isinstance(found, list) else [found]
        plug_in(module for module in modules if isinstance(module, str) and module)


def is_plugged(row: Key, value: Any) -> bool:
    """Return True for a name of a plug-in, given to a key that otherwise takes the peer's own names."""
    return isinstance(value, str) and any(
        value in registry.plugged() for field, registry in _REGISTRIES.items() if field in row.fields
    )
