"""Settings of a registered function: its keyword-only parameters with their types, bounds, defaults and meanings.

Types are read from annotations without importing the module that holds them: ``int``, ``float``, ``bool``, ``str``,
``Literal[...]``, lists and unions of these, and bounds as ``Annotated[float, Field(gt=0)]`` or by a name from this file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
# Factors of a loss: within these bounds its numbers stay far inside of float32.
Strength = Annotated[float, Field(ge=1e-6, le=1e4)]
Weight = Annotated[float, Field(ge=0, le=1e4)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]

REQUIRED: Any = ...  # the default of a setting that must be given

_NAMES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "Positive": Positive,
    "NonNegative": NonNegative,
    "Strength": Strength,
    "Weight": Weight,
    "Share": Share,
    "BelowHalf": BelowHalf,
    "PositiveInt": PositiveInt,
    "NonNegativeInt": NonNegativeInt,
}
_CONTAINERS = {"list": list, "Sequence": list, "dict": dict, "Mapping": dict}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a registered function."""

    name: str
    type: Any
    """Annotation, with bounds; Any where it could not be read."""
    default: Any
    """REQUIRED where the setting must be given."""
    meaning: str
    """The setting's line under ``Settings:`` in the docstring."""

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    def field(self) -> FieldInfo:
        """The setting as a field of a configuration."""
        found: FieldInfo = FieldInfo.from_annotated_attribute(self.type, Field(self.default, description=self.meaning))
        return found

    def checked(self, value: Any) -> Any:
        """The value, converted to the setting's type. Raises: pydantic.ValidationError."""
        return _adapter(self).validate_python(value)

    def example(self) -> Any:
        """The default; for a setting that must be given, some value that it takes."""
        if not self.required:
            return self.default
        for value in (0.5, 1, 2, True, "", [], {}, *_literals(self.type)):
            with suppress(ValidationError):
                return self.checked(value)
        return None

    def is_default(self, value: Any) -> bool:
        """True for the default, and for null where the setting has none."""
        return value is None if self.required else bool(value == self.default)


def merged(by_name: Mapping[str, Setting]) -> Setting:
    """One setting of several functions. Its meaning lists the names that share one; where types differ, any of them will do;
    where defaults differ, it has that of the first."""
    settings = list(by_name.values())
    readers: dict[str, list[str]] = {}
    for name, setting in by_name.items():
        readers.setdefault(setting.meaning, []).append(name)
    texts = [f"{', '.join(names)}: {meaning}" for meaning, names in readers.items()]
    types: list[Any] = []
    for setting in settings:
        if all(repr(setting.type) != repr(each) for each in types):
            types.append(setting.type)
    kind = types[0] if len(types) == 1 else Union[tuple(types)]  # noqa: UP007 - of values
    return Setting(settings[0].name, kind, settings[0].default, " ".join(texts))


_ADAPTERS: dict[tuple[str, str], TypeAdapter[Any]] = {}


def _adapter(setting: Setting) -> TypeAdapter[Any]:
    """A truth value is no number: pydantic would read it as 1 or 0."""
    key = setting.name, repr(setting.type)
    if key not in _ADAPTERS:
        annotation = setting.type
        if is_number(annotation):
            annotation = Annotated[annotation, BeforeValidator(_no_truth_value)]
        _ADAPTERS[key] = TypeAdapter(annotation, config={"allow_inf_nan": False})
    return _ADAPTERS[key]


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


def is_number(annotation: Any) -> bool:
    """True when the annotation takes a number, and nothing that a truth value would be too."""
    members = _members(annotation)
    # Numbers, or the members of a Literal.
    numbers = any(part in (int, float) or type(part) is int for part in members)
    return numbers and not any(part in (bool, str, Any) for part in members)


def _members(annotation: Any) -> list[Any]:
    """The types of a union, without their bounds."""
    if hasattr(annotation, "__metadata__"):
        return _members(annotation.__origin__)
    parts = get_args(annotation)
    return [member for part in parts for member in _members(part)] if parts else [annotation]


def _literals(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def default_of(node: ast.expr | None) -> Any:
    """The value of a default in source; a list for a tuple. Raises: ValueError when it is no literal."""
    if node is None:
        return REQUIRED
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, tuple) else value


def type_of(node: ast.expr | None) -> Any:
    """The type that an annotation in source names; Any for one that is none of those above."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(text)):
            return type_of(ast.parse(text, mode="eval").body)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _NAMES.get(name, _CONTAINERS.get(name, Any))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[type_of(left), type_of(right)]  # noqa: UP007 - of values
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            return _subscripted(name, inner.elts if isinstance(inner, ast.Tuple) else [inner])
    return Any


def _subscripted(name: str, parts: Sequence[ast.expr]) -> Any:
    if name == "Literal":
        return Literal[tuple(ast.literal_eval(part) for part in parts)]
    if name == "Annotated":
        return Annotated[(type_of(parts[0]), *(bound for part in parts[1:] if (bound := _bound(part))))]
    if name == "Optional":
        return Union[type_of(parts[0]), None]  # noqa: UP007 - of values
    if name in _CONTAINERS:
        container: Any = _CONTAINERS[name]
        return container[tuple(type_of(part) for part in parts)]
    return Any


def _bound(node: ast.expr) -> Any:
    """``Field(gt=0)`` in source; None for anything else."""
    match node:
        case ast.Call(func=ast.Name(id="Field") | ast.Attribute(attr="Field"), args=[], keywords=keywords):
            return Field(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg})
    return None


_HEADING = re.compile(r"^(\s*)Settings:\s*$")
_LINE = re.compile(r"^(\s+)(\w+): (.*)$")


@cache
def meanings(docstring: str) -> Mapping[str, str]:
    """Return name -> text of the lines under ``Settings:`` in a docstring; a more indented line continues the one above."""
    found: dict[str, str] = {}
    lines = docstring.splitlines()
    start = next((number for number, line in enumerate(lines) if _HEADING.match(line)), None)
    if start is None:
        return found
    name, indent = "", 0
    for line in lines[start + 1 :]:
        depth = len(line) - len(line.lstrip())
        match = _LINE.match(line)
        if match and (not name or depth == indent):
            name, indent = match[2], depth
            found[name] = match[3]
        elif name and line.strip() and depth > indent:
            found[name] += " " + line.strip()
        else:
            break
    return found
