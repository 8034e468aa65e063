"""Types of the program's values, as far as its annotations tell: for ``config_readers``."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

import posttrain
import posttrain.config
import posttrain.plan
from posttrain.config.base import Section

_SEQUENCES = {"list", "Sequence", "Iterable", "Iterator", "Collection", "set", "frozenset", "Generator", "Reversible"}
_MAPPINGS = {"dict", "Mapping", "MutableMapping", "defaultdict", "MappingProxyType"}


@dataclass(frozen=True)
class Type:
    """Possible types of a value: names of classes, the type of its elements, constant texts."""

    classes: frozenset[str] = frozenset()
    element: Type | None = None  # of a sequence, or of a mapping's values
    parts: tuple[Type, ...] = ()  # of a tuple of known length
    texts: frozenset[str] = frozenset()
    argument: Type | None = None  # of a generic class

    def __or__(self, other: Type) -> Type:
        element = self.element or other.element
        if self.element and other.element and self.element != other.element:
            element = self.element | other.element
        parts = self.parts or other.parts
        if self.parts and len(self.parts) == len(other.parts):
            parts = tuple(one | two for one, two in zip(self.parts, other.parts, strict=True))
        classes, texts = self.classes | other.classes, self.texts | other.texts
        return Type(classes, element, parts, texts, self.argument or other.argument)

    @property
    def each(self) -> Type:
        """The type of an element."""
        found = self.element or UNKNOWN
        for part in self.parts:
            found |= part
        return found


UNKNOWN = Type()


@dataclass
class Class:
    """A class of the program."""

    node: ast.ClassDef
    bases: list[str]
    attributes: dict[str, Type] = field(default_factory=dict)


def sections() -> dict[str, type[Section]]:
    """All sections of configurations and options, by name."""
    for package in (posttrain.config, posttrain.plan):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    found: dict[str, type[Section]] = {}
    waiting: list[type[Section]] = [Section]
    while waiting:
        one = waiting.pop()
        found[one.__name__] = one
        waiting += one.__subclasses__()
    return found


class Program:
    """The syntax trees of the program, and what its annotations say.

    Args: trees, by path relative to the package.
    """

    def __init__(self, trees: Mapping[str, ast.Module]):
        self.trees = trees
        self.sections = sections()
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self.aliases: dict[str, ast.expr] = {}
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    bases = [name_of(base) for base in node.bases]
                    self.classes.setdefault(node.name, Class(node, bases))
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.functions.setdefault(node.name, node)
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Subscript):
                    self.aliases.setdefault(name_of(node.targets[0]), node.value)
        self.passed_on: set[tuple[str, str]] = set()  # sections, and the classes that are made of all of their fields

    def annotated(self, node: ast.expr | None, depth: int = 0) -> Type:
        """Return the type that an annotation says."""
        if node is None or depth > 8:
            return UNKNOWN
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotated(ast.parse(node.value, mode="eval").body, depth + 1)
        if isinstance(node, ast.BinOp):
            return self.annotated(node.left, depth + 1) | self.annotated(node.right, depth + 1)
        name = name_of(node)
        if isinstance(node, ast.Subscript):
            inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if name in _SEQUENCES or (name in ("tuple", "Tuple") and _is_ellipsis(inside[-1])):
                return Type(element=self.annotated(inside[0], depth + 1))
            if name in _MAPPINGS:
                return Type(element=self.annotated(inside[-1], depth + 1))
            if name == "tuple":
                return Type(parts=tuple(self.annotated(each, depth + 1) for each in inside))
            if name in ("Optional", "Annotated", "AbstractContextManager", "type", "Final", "ClassVar", "Promise"):
                return self.annotated(inside[0], depth + 1)
            if name in self.classes:
                return Type(frozenset({name}), argument=self.annotated(inside[0], depth + 1))
            if name in self.aliases:
                return self.annotated(self.aliases[name], depth + 1)
            return UNKNOWN
        if name in self.sections or name in self.classes:
            return Type(frozenset({name}))
        if name in self.aliases:
            return self.annotated(self.aliases[name], depth + 1)
        return UNKNOWN

    def fitting(self, protocol: str) -> list[str]:
        """Return the sections that have all members of a Protocol; none for another class."""
        known = self.classes.get(protocol)
        if known is None or "Protocol" not in known.bases:
            return []
        members = {each.name for each in known.node.body if isinstance(each, ast.FunctionDef)}
        members |= {name_of(each.target) for each in known.node.body if isinstance(each, ast.AnnAssign)}
        return (
            [name for name, model in self.sections.items() if members <= model.model_fields.keys()] if members else []
        )

    def of_field(self, section: str, name: str) -> Type | None:
        """Return the type of a section's field; None where it has no such field."""
        model = self.sections[section].model_fields.get(name)
        return None if model is None else _of_annotation(model.annotation)

    def member(self, of: Type, name: str) -> Type:
        """Return the type of an attribute, or what a method returns."""
        found = UNKNOWN
        for class_name in of.classes:
            if class_name in self.sections and (known := self.of_field(class_name, name)) is not None:
                found |= known
                continue
            found |= self._of_class(class_name, name, of.argument, set())
        return found

    def _of_class(self, class_name: str, name: str, argument: Type | None, seen: set[str]) -> Type:
        known = self.classes.get(class_name)
        if known is None or class_name in seen:
            return UNKNOWN
        seen.add(class_name)
        for node in known.node.body:
            if isinstance(node, ast.AnnAssign) and name_of(node.target) == name:
                return self._maybe_generic(node.annotation, class_name, argument)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return self._maybe_generic(node.returns, class_name, argument)
        if name in known.attributes:
            return known.attributes[name]
        for base in known.bases:
            if (found := self._of_class(base, name, argument, seen)) != UNKNOWN:
                return found
        return UNKNOWN

    def _maybe_generic(self, node: ast.expr | None, class_name: str, argument: Type | None) -> Type:
        if (
            argument is not None
            and node is not None
            and name_of(node) not in self.classes
            and isinstance(node, ast.Name)
        ):
            known = self.annotated(node)
            return argument if known == UNKNOWN else known
        return self.annotated(node)


def _of_annotation(annotation: Any) -> Type:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Type(frozenset({annotation.__name__}))
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (list, tuple, set):
        return Type(element=_of_annotation(inside[0])) if inside else UNKNOWN
    if origin is dict:
        return Type(element=_of_annotation(inside[-1]))
    found = UNKNOWN
    for each in inside:
        found |= _of_annotation(each)
    return found


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
