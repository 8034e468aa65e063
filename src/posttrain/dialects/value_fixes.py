"""The fix for a value that has not the type of its key in a dialect's table, by what its writer most likely meant."""

from __future__ import annotations

import re
from typing import Any

import yaml

from posttrain.dialects.ledger import Key
from posttrain.dialects.value_types import choices, fits, type_text
from posttrain.errors import nearest
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, Registry


def fix_of_value(value: Any, row: Key) -> str:
    """The fix for ``value``, which does not fit the type of ``row``; "" for one that tells nothing."""
    if isinstance(value, str):
        return _of_text(value, row)
    if isinstance(value, float) and value.is_integer() and fits(int(value), row.type):
        return f"write {int(value)}"
    if value in (0, 1) and not isinstance(value, bool) and fits(True, row.type):
        return f"write {bool(value)}"
    if type_text(row.type).startswith("list") and isinstance(value, int | float):
        return f"write [{value}]"
    return "a share is above 0 and at most 1" if "share" in type_text(row.type) else ""


def quoted_list(value: Any, type: Any) -> list[Any] | None:
    """The list in a text such as "[console,wandb]", which had more quotes than it needs; None where the type takes no list."""
    if not isinstance(value, str) or "list of" not in type_text(type) or not re.fullmatch(r"\s*\[.*\]\s*", value):
        return None
    try:
        items = yaml.safe_load(value)
    except yaml.YAMLError:
        return None
    return items if isinstance(items, list) and fits(items, type) else None


def _of_text(value: str, row: Key) -> str:
    if value.lower() in ("none", "null", "nil") and fits(None, row.type):
        return "write null"
    if options := [str(option) for option in choices(row.type)]:
        return _of_options(value, options, row)
    if type_text(row.type).startswith("list"):
        return f"write [{value}]"
    if re.fullmatch(r"\d{1,3}([,_']\d{3})+", value) and fits(int(re.sub(r"\D", "", value)), row.type):
        return f"write {re.sub('[^0-9]', '', value)}"
    if re.fullmatch(r"[+-]?\d+", value) and fits(int(value), row.type):
        return f"write {value} without quotes"
    if value.lower() in ("yes", "no", "on", "off") and fits(True, row.type):
        return f"write {value.lower() in ('yes', 'on')}"
    return ""


def _of_options(value: str, options: list[str], row: Key) -> str:
    """The option that is meant. A name that means something else is not taken for a misspelling."""
    same = next((option for option in options if option.lower() == value.lower()), None)
    other = "advantage.name" if "loss.name" in row.fields else "loss.name" if "advantage.name" in row.fields else ""
    registries: dict[str, Registry[Any]] = {"advantage.name": ADVANTAGES, "loss.name": POLICY_LOSSES}
    names = registries[other].names() if other else []
    if same is None and value.lower() in names:
        estimator = other == "advantage.name"
        return (
            f"{value} is {'an advantage estimator' if estimator else 'a policy loss'}, which this key does not choose"
        )
    guess = same or nearest(value.lower(), options)
    if guess and row.instead and other:
        return f"did you mean {guess}? One of your own: {row.instead}"
    return f"did you mean {guess}?" if guess else row.instead
