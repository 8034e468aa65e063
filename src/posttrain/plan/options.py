"""The options of a training engine, read from plain values into the engine's own section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import UnionType
from typing import Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo

from posttrain.config.base import Section
from posttrain.config.reading.keys import field_of
from posttrain.config.reading.sources import SourceMap
from posttrain.config.reading.validate import validate
from posttrain.errors import Problem, did_you_mean

O = TypeVar("O", bound=Section)  # noqa: E741
Settings = TypeVar("Settings")
AUTO = "auto"  # a peer's word for a value that its library works out


class Options(Section):
    """A section of options. Its validator is built when it is first used: a plan loads every engine and uses one."""

    model_config = ConfigDict(defer_build=True)


class Reading(NamedTuple, Generic[Settings]):
    """An engine's settings, what is wrong with the options they were read from, and which of these have no effect."""

    settings: Settings
    problems: list[Problem]
    warnings: list[str]


def option(default: Any, *, fix: str, **constraints: Any) -> Any:
    """Declare an option. Args: fix is offered for a value that is not accepted."""
    return Field(default, json_schema_extra={"fix": fix}, **constraints)


def ignored(reason: str) -> Any:
    """Declare an option of a peer that has no effect here. Args: reason, in which {role} is the role that has the option."""
    return Field(
        default=None, description=f"Ignored: {reason.format(role='policy')}.", json_schema_extra={"ignored": reason}
    )


def read_options(kind: type[O], options: Mapping[str, Any], *, at: str, engine: str) -> tuple[O, list[Problem]]:
    """Read options as a section of a kind; what is wrong is reported, and its default stands in.

    Null means not given, at every depth. Args: at is the dotted name of the options in the configuration.
    """
    given, problems = _known(kind, options, at, engine)
    read, found = validate(given, SourceMap(None, {}), kind)
    problems += [
        replace(
            problem,
            what=f"{engine}: {problem.what}",
            fix=_extra(field_of(problem.field, kind)).get("fix", "") or problem.fix,
            where="",
            field=f"{at}.{problem.field}",
        )
        for problem in found
    ]
    return read, problems


def ignored_options(section: Section, *, at: str, role: str) -> Iterator[str]:
    """Yield a sentence for each option that asks for something and has no effect."""
    for name, field in type(section).model_fields.items():
        reason, value = _extra(field).get("ignored"), getattr(section, name)
        if reason and value and value != AUTO:
            yield f"{at}.{name} has no effect: {reason.format(role=role)}"


def _extra(field: FieldInfo | None) -> dict[str, Any]:
    return field.json_schema_extra if field is not None and isinstance(field.json_schema_extra, dict) else {}


def _known(
    kind: type[Section], options: Mapping[str, Any], at: str, engine: str
) -> tuple[dict[str, Any], list[Problem]]:
    """Leave out what is null or unknown. A section that allows further names reports them itself."""
    open_ended = kind.model_config.get("extra") == "allow"
    given, problems = {}, []
    for name, value in options.items():
        field = kind.model_fields.get(name)
        if field is None and not open_ended:
            known = list(kind.model_fields)
            fix = did_you_mean(name, known, listed=True)
            problems.append(Problem(f"{engine} has no option {name}", fix=fix, field=f"{at}.{name}"))
        elif value is not None:
            inner = _section(field)
            if inner is not None and isinstance(value, Mapping):
                value, wrong = _known(inner, value, f"{at}.{name}", engine)
                problems += wrong
            given[name] = value
    return given, problems


def _section(field: FieldInfo | None) -> type[Section] | None:
    """Return the kind of section that a field holds, if it holds one."""
    annotation = field.annotation if field is not None else None
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((each for each in members if isinstance(each, type) and issubclass(each, Section)), None)
