"""Validation of plain values: a configuration, and every problem with single keys in plain words."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_origin

from annotated_types import Le, Lt, MinLen
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from posttrain.config.base import Section
from posttrain.config.reading import keys
from posttrain.config.reading.fixes import fix_of
from posttrain.config.reading.sources import SourceMap, child, same_branch
from posttrain.errors import GUESS, ConfigError, Problem
from posttrain.settings import is_number

C = TypeVar("C", bound=Section)

MOST_REPAIRS = 50  # rounds; each takes out all that pydantic refuses
# pydantic's error type -> what the value must be, from the error's context.
EXPECTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "int_type": lambda _: "a whole number",
    "int_parsing": lambda _: "a whole number",
    "int_parsing_size": lambda _: "a whole number that a computer can hold",
    "int_from_float": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "float_parsing": lambda _: "a number",
    "finite_number": lambda _: "a finite number",
    "bool_type": lambda _: "true or false",
    "bool_parsing": lambda _: "true or false",
    "string_type": lambda _: "text",
    "list_type": lambda _: "a list",
    "tuple_type": lambda _: "a list",
    "dict_type": lambda _: "a section of key: value lines",
    "model_type": lambda _: "a section of key: value lines",
    "literal_error": lambda context: str(context["expected"]).replace("'", ""),
    "greater_than": lambda context: f"above {_number(context['gt'])}",
    "greater_than_equal": lambda context: f"at least {_number(context['ge'])}",
    "less_than": lambda context: f"below {_number(context['lt'])}",
    "less_than_equal": lambda context: f"at most {_number(context['le'])}",
    "too_short": lambda context: f"a list of at least {context['min_length']}",
    "too_long": lambda context: f"a list of at most {context['max_length']}",
}


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def validate(values: dict[str, Any], sources: SourceMap, root: type[C]) -> tuple[C, list[Problem]]:
    """The configuration of kind ``root`` that ``values`` describe, and everything that is wrong with single keys.

    Where there are problems, the configuration has a default or an empty value in the place of what is wrong.
    Raises: ConfigError with the problems where even that is not valid.
    """
    values = copy.deepcopy(values)
    for name, field in keys.sections(root)[""].items():
        kind = field.annotation
        # So that what is missing in a section is reported key by key
        if field.is_required() and isinstance(kind, type) and issubclass(kind, Section):
            values.setdefault(name, {})
    problems = _misread_numbers(values, "", sources, root)
    for _ in range(MOST_REPAIRS):
        try:
            return root.model_validate(values), _without_what_was_meant(problems)
        except ValidationError as error:
            details = error.errors(include_url=False)
        # A union reports once per member: one message for the key.
        by_key: dict[str, list[ErrorDetails]] = {}
        for detail in details:
            by_key.setdefault(_key(detail, values), []).append(detail)
        for key, group in by_key.items():
            # What the repairs below leave behind is no mistake of the user's.
            if not any(same_branch(problem.field, key) for problem in problems):
                problems.append(_problem(key, group, values, sources, root))
        for key, group in by_key.items():
            _repair(values, key, root, absent=_is_absent(group[0]))
    raise ConfigError(problems)


def _without_what_was_meant(problems: list[Problem]) -> list[Problem]:
    """The problems, without keys that must be given and were, misspelt."""
    meant = {found[1] for problem in problems if (found := re.match(rf"{GUESS} ([\w.]+)\?", problem.fix))}
    return [one for one in problems if not (one.field in meant and one.what.startswith(f"{one.field} must be given"))]


def _key(detail: ErrorDetails, values: dict[str, Any]) -> str:
    """The dotted key an error is about: its location, up to where the values end."""
    key = ""
    node: Any = values
    for part in detail["loc"]:
        inside = part in node if isinstance(node, dict) else isinstance(node, list) and part in range(len(node))
        if not inside:
            return child(key, part) if _is_absent(detail) else key
        key, node = child(key, part), node[part]
    return key


def _is_absent(detail: ErrorDetails) -> bool:
    """A required key is not there. (A tuple that is too short is also called missing, with an index.)"""
    return detail["type"] == "missing" and isinstance(detail["loc"][-1], str)


def _problem(
    key: str, group: list[ErrorDetails], values: dict[str, Any], sources: SourceMap, root: type[Section]
) -> Problem:
    detail = group[0]
    field = keys.field_of(key, root)
    leaf = _leaf(key)
    where = sources.where(key)
    kind = detail["type"]
    if kind == "unknown_setting":
        known = detail["ctx"]["known"]
        return Problem(f"there is no key {key}", fix=keys.suggest(key, root, known), where=where, field=key)
    if kind == "extra_forbidden":
        return Problem(f"there is no key {key}", fix=keys.suggest(key, root), where=where, field=key)
    if kind == "invalid_key":
        what = f"{key} is a number or truth value, and keys are names"
        fix = "a decimal has a point, not a comma; a name that looks like a number goes into quotes"
        return Problem(what, fix=fix, where=where, field=key)
    if _is_absent(detail):
        about = _about(key, root)
        fix = f"write it, or add {key}=... to the command"
        return Problem(f"{key} must be given{about}", fix=fix, where=sources.where_missing(key), field=key)
    value = _value(values, key)
    if kind == "missing":  # a list that is shorter than its tuple
        what = f"{leaf} has {len(value)} values, which are too few"
        return Problem(what, fix=fix_of(key, kind, value, field, {}, ()), where=where, field=key)
    if value is None and kind == "model_type":
        fix = "write keys below it, or remove the line"
        return Problem(f"the section {key} is empty", fix=fix, where=where, field=key)
    if kind not in EXPECTED:
        return Problem(f"{key}: {detail['msg']}", where=where, field=key)
    wanted = list(dict.fromkeys(EXPECTED[one["type"]](one.get("ctx", {})) for one in group if one["type"] in EXPECTED))
    if "a number" in wanted:
        wanted = [each for each in wanted if each != "a whole number"]
    what = f"{leaf} must be {' or '.join(wanted)}, not {show(value)}{_about(key, root) if value is None else ''}"
    fix = fix_of(key, kind, value, field, detail.get("ctx", {}), keys.sections(root).get(keys.pattern(key, root), {}))
    return Problem(what, fix=fix, where=where, field=key)


def _about(key: str, root: type[Section]) -> str:
    """The first words of a field's description, in brackets."""
    meaning = keys.meaning(key, root)
    return f" ({re.split(r' [(]|[,.]', meaning)[0]})" if meaning else ""


def _leaf(key: str) -> str:
    """The last name in a key, with the index behind it in a list: ``train_files.0``"""
    *parents, last = key.split(".")
    return f"{parents[-1]}.{last}" if parents and last.isdecimal() else last


def show(value: Any) -> str:
    """A value as it would be written."""
    match value:
        case None:
            return "null"
        case True | False:
            return str(value).lower()
        case dict():
            return "a section"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:
            return repr(value)


def _value(values: Any, key: str) -> Any:
    """Return the value at a dotted key; None when there is none."""
    node = values
    for part in key.split("."):
        if isinstance(node, list):
            node = node[int(part)] if part.isdecimal() and int(part) < len(node) else None
        elif isinstance(node, dict):
            # A key may have been written as a number; its dotted name is text.
            node = next((value for name, value in node.items() if str(name) == part), None)
        else:
            return None
    return node


def _repair(values: dict[str, Any], key: str, root: type[Section], *, absent: bool) -> None:
    """Take out what is wrong, so that the rest can be understood; what must be there becomes empty."""
    parent, _, leaf = key.rpartition(".")
    node = _value(values, parent) if parent else values
    if isinstance(node, list):  # without the item, the list would say something else: it goes as a whole
        _repair(values, parent, root, absent=False)
    elif isinstance(node, dict) and absent:
        field = keys.field_of(key, root)
        node[leaf] = _stand_in(field)
    elif isinstance(node, dict):
        for name in [name for name in node if str(name) == leaf]:
            del node[name]


def _stand_in(field: FieldInfo | None) -> Any:
    """A value of a field's kind, as long as it must be: one that is refused again would be repaired for ever."""
    annotation = field.annotation if field else None
    shortest = max((one.min_length for one in field.metadata if isinstance(one, MinLen)), default=0) if field else 0
    if annotation is str:
        return "?" * shortest
    if is_number(annotation):
        return 1
    return [""] * shortest if get_origin(annotation) is list else {}


def _has_upper_bound(field: FieldInfo) -> bool:
    return any(isinstance(each, Le | Lt) for each in field.metadata)


def _misread_numbers(node: Any, key: str, sources: SourceMap, root: type[Section]) -> list[Problem]:
    """Report what pydantic would take for another number than its writer: true and false for 1 and 0, ``1e_6`` for 1e6; and
    whole numbers that no count can be."""
    if isinstance(node, dict):
        parts = [(child(key, name), value) for name, value in node.items()]
        return [problem for name, value in parts for problem in _misread_numbers(value, name, sources, root)]
    field = keys.field_of(key, root)
    if isinstance(node, int) and abs(node) >= 2**63 and not (field and _has_upper_bound(field)):
        what = f"{_leaf(key)} must be a whole number of at most 18 digits, not {show(node)}"
        return [Problem(what, where=sources.where(key), field=key)]
    misread = isinstance(node, bool) or (isinstance(node, str) and re.search(r"[^0-9]_|_[^0-9]|__", node))
    if not misread or field is None or not is_number(field.annotation):
        return []
    return [Problem(f"{_leaf(key)} must be a number, not {show(node)}", where=sources.where(key), field=key)]
