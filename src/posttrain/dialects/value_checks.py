"""Checks of written values against the types of their keys; what their writer most likely meant stands in for wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.config.reading.validate import show
from posttrain.dialects.here import of_devices
from posttrain.dialects.known import Known
from posttrain.dialects.ledger import Key
from posttrain.dialects.option_names import type_of_option
from posttrain.dialects.own_values import left_out, way_on
from posttrain.dialects.plugged import is_own
from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import parents
from posttrain.dialects.value_fixes import fix_of_value, quoted_list
from posttrain.dialects.value_types import fits, type_text
from posttrain.errors import GUESS, Problem, nearest

LABELS = frozenset({"run.name", "tracking.project"})  # fields that only name a run


def right_type(reader: Reader, key: str, value: Any, row: Key) -> bool:
    """True for a value of the key's type, or one that is read as such with a warning; another is reported."""
    if (items := quoted_list(value, row.type)) is not None:
        reader.warn(f"{key} is {value!r}, a text, and is read as the list in it")
        reader.put(key, items)
        return True
    if value == "" and LABELS.intersection(row.fields) and isinstance(row.default, str):
        # The peers run with it
        reader.warn(f"{key} is empty, and the run is called {row.default}; was a variable of the script not set?")
        reader.put(key, row.default)
        return True
    if row.name.endswith("**") or fits(value, row.type) or is_own(reader, row, value):
        return True
    if value == "" and fits(False, row.type):
        # The peers run with it: an empty text is false in Python.
        reader.warn(f"{key} is empty, and is read as false; was a variable of the script not set?")
        reader.put(key, False)
        return True
    if isinstance(value, str) and fits(True, row.type) and nearest(value.lower(), ("true",)):
        # A text is true in Python, so that the peers run with it
        reader.warn(f"{key} is {value!r}, a misspelling, and is read as true")
        reader.put(key, True)
        return True
    if value == "" and reader.here and of_devices(row):
        reader.warn(
            f"{key} is empty, and is read as 1, for the one device of --here; was a variable of the script not set?"
        )
        reader.put(key, 1)
        return True
    if value == "":
        reader.empty(key)
        return False
    if left_out(reader, row, key, value):
        return True
    fix = way_on(reader, row, key, value) or fix_of_value(value, row)
    reader.problem(f"{key} must be {type_text(row.type)}, not {show(value)}", key=key, fix=fix)
    meant = fix.removeprefix(GUESS).strip(" ?")
    if fix.startswith(GUESS) and fits(meant, row.type):
        reader.stand_ins[key] = meant
    reader.bad.add(key)
    return False


def right_option(reader: Reader, known: Known, key: str, value: Any, row: Key) -> bool:
    """Look at a key of a section with any names: it may be a slip of a known one, and a known one has a type."""
    if near := known.slip(key, row):
        what, where = f"{key} is not known here", reader.sources.where(key)
        reader.warn(f"{what}, at {where}; {GUESS} {near}?")
        reader.slips.append(Problem(what, fix=f"{GUESS} {near}?", where=where, field=key))
    for above in parents(key):  # a section in the place of an option
        own_row = reader.ledger.by_name.get(above)
        kind = own_row.type if own_row is not None else type_of_option(above, None)
        if fits({}, kind) or above in reader.bad:
            continue
        reader.problem(f"{above} must be {type_text(kind)}, not a section", key=above, fix="write the value itself")
        reader.bad.add(above)
        return False
    return right_type(reader, key, value, replace(row, name=key, type=type_of_option(key, value)))
