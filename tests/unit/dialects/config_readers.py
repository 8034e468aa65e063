"""Readers of configuration fields: a pass over the program's syntax trees that follows types, as far as annotations give them.

A read is ``value.field`` (or ``getattr`` with a known name) where the type of ``value`` is a section of the configuration. Types
come from annotations of parameters, returns, attributes and dataclass fields, and through assignments, loops and comprehensions.
What the pass cannot follow is no read, so that it may miss a reader and never invents one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.dialects.program_types import UNKNOWN, Program, Type, name_of

import posttrain

SOURCE = Path(posttrain.__file__).parent
# Calls that give back what they are given, or a copy of it.
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


@dataclass
class Readers:
    """Everything that the pass has found: (section, field) -> places, and the names that each function mentions."""

    reads: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    # Functions of config that others may call: name -> (names it mentions, reads)
    within: dict[str, tuple[set[str], set[tuple[str, str]]]] = field(default_factory=dict)
    mentioned: set[str] = field(default_factory=set)


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

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815

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

    visit_AsyncFor = visit_For  # type: ignore[assignment]  # noqa: N815

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            value = self.of(item.context_expr)
            if item.optional_vars:
                self.bind(item.optional_vars, value.element or value)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncWith = visit_With  # type: ignore[assignment]  # noqa: N815

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
        method = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if method is not None:
            found: Type = method(node)
            return found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.of(child)
            elif not isinstance(child, ast.expr_context):
                self.visit(child)
        return UNKNOWN

    def _of_name(self, node: ast.Name) -> Type:
        for scope in reversed(self.scopes):
            if node.id in scope:
                return scope[node.id]
        return UNKNOWN

    def _of_constant(self, node: ast.Constant) -> Type:
        return Type(texts=frozenset({node.value})) if isinstance(node.value, str) else UNKNOWN

    def _of_joinedstr(self, node: ast.JoinedStr) -> Type:
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

    def _of_attribute(self, node: ast.Attribute) -> Type:
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

    def _of_call(self, node: ast.Call) -> Type:
        given = [self.of(each.value if isinstance(each, ast.Starred) else each) for each in node.args]
        for keyword in node.keywords:
            self.of(keyword.value)
        name = name_of(node.func)
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
                    if parameter.annotation is not None and name_of(parameter.annotation) == name_of(function.returns):
                        return each
            return known
        if name in self.program.classes or name in self.program.sections:
            return Type(frozenset({name}))
        self.of(node.func)
        return UNKNOWN

    def pass_on(self, made: str, given: ast.expr | None) -> None:
        """``made(**section.model_dump())``: the new object's attributes are the section's fields."""
        if not isinstance(given, ast.Call) or name_of(given.func) != "model_dump" or made not in self.program.classes:
            return
        assert isinstance(given.func, ast.Attribute)
        for section in self.of(given.func.value).classes & self.program.sections.keys():
            self.program.passed_on.add((section, made))

    def _of_subscript(self, node: ast.Subscript) -> Type:
        owner = self.of(node.value)
        self.of(node.slice)
        if isinstance(node.slice, ast.Slice):
            return owner
        place = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(place, int) and -len(owner.parts) <= place < len(owner.parts):
            return owner.parts[place]
        return owner.each

    def _of_tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Type:
        if any(isinstance(each, ast.Starred) for each in node.elts):
            found = UNKNOWN
            for each in node.elts:
                found |= self.of(each.value).each if isinstance(each, ast.Starred) else self.of(each)
            return Type(element=found)
        return Type(parts=tuple(self.of(each) for each in node.elts))

    _of_list = _of_set = _of_tuple

    def _of_dict(self, node: ast.Dict) -> Type:
        keys = UNKNOWN
        found = UNKNOWN
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                keys |= self.of(key)
            found |= self.of(value) if key is not None else self.of(value).each
        return Type(element=found)

    def _of_ifexp(self, node: ast.IfExp) -> Type:
        self.of(node.test)
        return self.of(node.body) | self.of(node.orelse)

    def _of_boolop(self, node: ast.BoolOp) -> Type:
        found = UNKNOWN
        for each in node.values:
            found |= self.of(each)
        return found

    def _of_binop(self, node: ast.BinOp) -> Type:
        return self.of(node.left) | self.of(node.right)

    def _of_namedexpr(self, node: ast.NamedExpr) -> Type:
        value = self.of(node.value)
        self.bind(node.target, value)
        return value

    def _of_await(self, node: ast.Await) -> Type:
        return self.of(node.value)

    def _of_starred(self, node: ast.Starred) -> Type:
        return self.of(node.value).each

    def _of_lambda(self, node: ast.Lambda) -> Type:
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

    def _of_listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Type:
        return Type(element=self._comprehension(node.generators, node.elt)[0])

    _of_setcomp = _of_generatorexp = _of_listcomp

    def _of_dictcomp(self, node: ast.DictComp) -> Type:
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
