"""Readers of configuration fields: a pass over the program's syntax trees that follows types, as far as annotations give them.

A read is ``value.field`` (or ``getattr`` with a known name) where the type of ``value`` is a section of the configuration. Types come
from annotations of parameters, returns, attributes and dataclass fields, and through assignments, loops and comprehensions. What
the pass cannot follow is no read, so that it may miss a reader and never invents one.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import posttrain
import posttrain.config
import posttrain.plan
from posttrain.config.base import Section

SOURCE = Path(posttrain.__file__).parent
_SEQUENCES = {"list", "Sequence", "Iterable", "Iterator", "Collection", "set", "frozenset", "Generator", "Reversible"}
_MAPPINGS = {"dict", "Mapping", "MutableMapping", "defaultdict", "MappingProxyType"}
_SAME = {
    "replace",
    "model_copy",
    "copy",
    "deepcopy",
    "list",
    "tuple",
    "sorted",
    "iter",
    "next",
    "reversed",
    "enumerate",
    "filter",
}


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


@dataclass
class Readers:
    """Everything that the pass has found: (section, field) -> places, and the names that each function mentions."""

    reads: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    # Functions of config that others may call: name -> (names it mentions, reads)
    within: dict[str, tuple[set[str], set[tuple[str, str]]]] = field(default_factory=dict)
    mentioned: set[str] = field(default_factory=set)


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
                    bases = [_name(base) for base in node.bases]
                    self.classes.setdefault(node.name, Class(node, bases))
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.functions.setdefault(node.name, node)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    if isinstance(node.value, ast.BinOp | ast.Subscript):
                        self.aliases.setdefault(node.targets[0].id, node.value)
        self.passed_on: set[tuple[str, str]] = set()  # sections, and the classes that are made of all of their fields

    def annotated(self, node: ast.expr | None, depth: int = 0) -> Type:
        """Return the type that an annotation says."""
        if node is None or depth > 8:
            return UNKNOWN
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotated(ast.parse(node.value, mode="eval").body, depth + 1)
        if isinstance(node, ast.BinOp):
            return self.annotated(node.left, depth + 1) | self.annotated(node.right, depth + 1)
        name = _name(node)
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
        members |= {_name(each.target) for each in known.node.body if isinstance(each, ast.AnnAssign)}
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
            if isinstance(node, ast.AnnAssign) and _name(node.target) == name:
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
        if argument is not None and node is not None and _name(node) not in self.classes and isinstance(node, ast.Name):
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


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class Pass(ast.NodeVisitor):
    """Evaluates the types of expressions in a file, function by function, and reports reads of sections."""

    def __init__(self, program: Program, on_read: Any):
        self.program, self.on_read = program, on_read
        self.scopes: list[dict[str, Type]] = [{}]
        self.inside: list[str] = []  # classes
        self.functions: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        scope: dict[str, Type] = {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for each in arguments:
            scope[each.arg] = self.program.annotated(each.annotation)
        if self.inside and arguments and arguments[0].arg == "self":
            scope["self"] = Type(frozenset({self.inside[-1]}))
        if node.args.vararg:
            scope[node.args.vararg.arg] = Type(element=self.program.annotated(node.args.vararg.annotation))
        if node.args.kwarg:
            scope[node.args.kwarg.arg] = Type(element=self.program.annotated(node.args.kwarg.annotation))
        self.scopes.append(scope)
        self.functions.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.functions.pop()
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.scopes.append({each.arg: UNKNOWN for each in node.args.args})
        self.of(node.body)
        self.scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.of(node.value)
        for target in node.targets:
            self.bind(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        value = self.of(node.value) if node.value else UNKNOWN
        self.bind(node.target, self.program.annotated(node.annotation) | value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.bind(node.target, self.of(node.target) | self.of(node.value))

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.bind(node.target, self.of(node.iter).each)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    visit_AsyncFor = visit_For  # type: ignore[assignment]

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            value = self.of(item.context_expr)
            if item.optional_vars:
                self.bind(item.optional_vars, value.element or value)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncWith = visit_With  # type: ignore[assignment]

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.of(node)
        else:
            super().generic_visit(node)

    def bind(self, target: ast.expr, value: Type) -> None:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = self.scopes[-1].get(target.id, UNKNOWN) | value
        elif isinstance(target, ast.Tuple | ast.List):
            for number, each in enumerate(target.elts):
                part = value.parts[number] if len(value.parts) == len(target.elts) else value.element or UNKNOWN
                self.bind(each, part)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, Type(element=value))
        elif isinstance(target, ast.Attribute):
            owner = self.of(target.value)
            for name in owner.classes & self.program.classes.keys():
                known = self.program.classes[name].attributes
                known[target.attr] = known.get(target.attr, UNKNOWN) | value
        else:
            self.of(target)

    def of(self, node: ast.expr) -> Type:
        """Return the type of an expression, and report what it reads."""
        method = getattr(self, f"_of_{type(node).__name__}", None)
        if method is not None:
            found: Type = method(node)
            return found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.of(child)
            elif not isinstance(child, ast.expr_context):
                self.visit(child)
        return UNKNOWN

    def _of_Name(self, node: ast.Name) -> Type:
        for scope in reversed(self.scopes):
            if node.id in scope:
                return scope[node.id]
        return UNKNOWN

    def _of_Constant(self, node: ast.Constant) -> Type:
        return Type(texts=frozenset({node.value})) if isinstance(node.value, str) else UNKNOWN

    def _of_JoinedStr(self, node: ast.JoinedStr) -> Type:
        """A text with holes; those whose texts are known are filled in."""
        found = {""}
        for part in node.values:
            if isinstance(part, ast.Constant):
                texts = {str(part.value)}
            else:
                assert isinstance(part, ast.FormattedValue)
                texts = set(self.of(part.value).texts)
            found = {before + text for before in found for text in texts}
        return Type(texts=frozenset(found))

    def _of_Attribute(self, node: ast.Attribute) -> Type:
        return self.read(self.of(node.value), node.attr, node)

    def read(self, owner: Type, name: str, node: ast.AST) -> Type:
        for one in owner.classes:
            if one in self.program.sections:
                if name in self.program.sections[one].model_fields:
                    self.on_read(one, name, node, self)
            else:
                self.on_read(one, name, node, self)
                for section in self.program.fitting(one):
                    self.on_read(section, name, node, self)
        return self.program.member(owner, name)

    def _of_Call(self, node: ast.Call) -> Type:
        given = [self.of(each.value if isinstance(each, ast.Starred) else each) for each in node.args]
        for keyword in node.keywords:
            self.of(keyword.value)
        name = _name(node.func)
        if isinstance(node.func, ast.Attribute):
            owner = self.of(node.func.value)
            if name in ("values", "get", "pop", "popleft", "setdefault"):
                return Type(element=owner.each) if name == "values" else owner.each
            if name == "items":
                return Type(element=Type(parts=(UNKNOWN, owner.each)))
            if name in _SAME:
                return owner
            return self.program.member(owner, name)
        if name == "getattr" and len(given) > 1:
            found = UNKNOWN
            for text in given[1].texts:
                found |= self.read(given[0], text, node)
            return found
        if name == "isinstance" and len(node.args) > 1 and isinstance(node.args[0], ast.Name):
            self.bind(node.args[0], self.program.annotated(node.args[1]))
        for keyword in node.keywords:
            self.pass_on(name, keyword.value if keyword.arg is None else None)
        if name == "zip":
            return Type(element=Type(parts=tuple(each.each for each in given)))
        if name == "enumerate" and given:
            return Type(element=Type(parts=(UNKNOWN, given[0].each)))
        if name == "next" and given:
            return given[0].each
        if name == "filter" and len(given) > 1:
            return given[1]
        if name in _SAME and given:
            return given[0]
        if name in self.program.functions:
            function = self.program.functions[name]
            known = self.program.annotated(function.returns)
            if known == UNKNOWN and function.returns is not None:  # of a type variable's type, perhaps
                for parameter, each in zip(function.args.args, given, strict=False):
                    if parameter.annotation is not None and _name(parameter.annotation) == _name(function.returns):
                        return each
            return known
        if name in self.program.classes or name in self.program.sections:
            return Type(frozenset({name}))
        self.of(node.func)
        return UNKNOWN

    def pass_on(self, made: str, given: ast.expr | None) -> None:
        """``made(**section.model_dump())``: the new object's attributes are the section's fields."""
        if not isinstance(given, ast.Call) or _name(given.func) != "model_dump" or made not in self.program.classes:
            return
        assert isinstance(given.func, ast.Attribute)
        for section in self.of(given.func.value).classes & self.program.sections.keys():
            self.program.passed_on.add((section, made))

    def _of_Subscript(self, node: ast.Subscript) -> Type:
        owner = self.of(node.value)
        self.of(node.slice)
        if isinstance(node.slice, ast.Slice):
            return owner
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            if -len(owner.parts) <= node.slice.value < len(owner.parts):
                return owner.parts[node.slice.value]
        return owner.each

    def _of_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Type:
        if any(isinstance(each, ast.Starred) for each in node.elts):
            found = UNKNOWN
            for each in node.elts:
                found |= self.of(each.value).each if isinstance(each, ast.Starred) else self.of(each)
            return Type(element=found)
        return Type(parts=tuple(self.of(each) for each in node.elts))

    _of_List = _of_Set = _of_Tuple

    def _of_Dict(self, node: ast.Dict) -> Type:
        keys = UNKNOWN
        found = UNKNOWN
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                keys |= self.of(key)
            found |= self.of(value) if key is not None else self.of(value).each
        return Type(element=found)

    def _of_IfExp(self, node: ast.IfExp) -> Type:
        self.of(node.test)
        return self.of(node.body) | self.of(node.orelse)

    def _of_BoolOp(self, node: ast.BoolOp) -> Type:
        found = UNKNOWN
        for each in node.values:
            found |= self.of(each)
        return found

    def _of_BinOp(self, node: ast.BinOp) -> Type:
        return self.of(node.left) | self.of(node.right)

    def _of_NamedExpr(self, node: ast.NamedExpr) -> Type:
        value = self.of(node.value)
        self.bind(node.target, value)
        return value

    def _of_Await(self, node: ast.Await) -> Type:
        return self.of(node.value)

    def _of_Starred(self, node: ast.Starred) -> Type:
        return self.of(node.value).each

    def _of_Lambda(self, node: ast.Lambda) -> Type:
        self.visit_Lambda(node)
        return UNKNOWN

    def _comprehension(self, generators: Sequence[ast.comprehension], *made: ast.expr) -> list[Type]:
        self.scopes.append({})
        for each in generators:
            self.bind(each.target, self.of(each.iter).each)
            for condition in each.ifs:
                self.of(condition)
        found = [self.of(each) for each in made]
        self.scopes.pop()
        return found

    def _of_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Type:
        return Type(element=self._comprehension(node.generators, node.elt)[0])

    _of_SetComp = _of_GeneratorExp = _of_ListComp

    def _of_DictComp(self, node: ast.DictComp) -> Type:
        return Type(element=self._comprehension(node.generators, node.key, node.value)[1])


def parsed(source: Path = SOURCE) -> dict[str, ast.Module]:
    """The syntax trees of the package's files, by relative path."""
    return {str(file.relative_to(source)): ast.parse(file.read_text("utf-8")) for file in sorted(source.rglob("*.py"))}


def find_readers(trees: Mapping[str, ast.Module]) -> Readers:
    """Find the reads of sections outside of ``config`` and ``dialects``, and in functions of ``config`` that are used outside."""
    program, found = Program(trees), Readers()
    by_function: dict[str, set[tuple[str, str]]] = {}

    def note(path: str) -> Any:
        def on_read(section: str, name: str, node: ast.AST, visitor: Pass) -> None:
            folder = path.split("/")[0]
            if folder == "config":
                if not path.startswith(("config/checks", "config/reading")) and visitor.functions:
                    by_function.setdefault(visitor.functions[0], set()).add((section, name))
            elif folder != "dialects":
                found.reads.setdefault((section, name), set()).add(f"{path}:{getattr(node, 'lineno', 0)}")

        return on_read

    for _ in range(2):  # attributes that the first round has found are known in the second
        for path, tree in trees.items():
            Pass(program, note(path)).visit(tree)
    mentions: dict[str, set[str]] = {}
    live: set[str] = set()
    for path, tree in trees.items():
        folder = path.split("/")[0]
        if folder == "config" and not path.startswith(("config/checks", "config/reading")):
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    mentions.setdefault(node.name, set()).update(_mentioned(node.body))
        elif folder not in ("config", "dialects"):
            live |= set(_mentioned(tree.body))
    waiting = [name for name in mentions if name in live]
    used = set(waiting)
    while waiting:
        for name in mentions[waiting.pop()] & mentions.keys() - used:
            used.add(name)
            waiting.append(name)
    for name in used:
        for read in by_function.get(name, ()):
            found.reads.setdefault(read, set()).add(f"config, {name}()")
    for section, made in program.passed_on:
        for name in program.sections[section].model_fields:
            if places := found.reads.get((made, name)):
                found.reads.setdefault((section, name), set()).update(places)
    return found


def _mentioned(body: Sequence[ast.AST]) -> Iterator[str]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+", node.value):
                yield node.value
