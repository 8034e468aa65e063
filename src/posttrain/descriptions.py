"""Descriptions of registered functions and classes, read from their source: nothing is imported."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from posttrain.settings import REQUIRED, Setting, default_of, meanings, type_of

F = TypeVar("F")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Description(Generic[F]):
    """The registered facts of a name, known without importing its module."""

    facts: F
    inputs: tuple[str, ...] = ()
    """Positional parameters: the tensors that the caller supplies, by name."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Keyword-only parameters: what the configuration supplies."""
    takes_more: bool = False
    """Takes **keywords besides its settings."""
    summary: str = ""
    """First paragraph of the docstring."""
    source: str = ""
    """The docstring's Source: where the formula comes from."""
    optional: frozenset[str] = frozenset()
    """Inputs that may be None: those of roles that a run need not have."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One decorator ``@REGISTRY.register("name", fact=True)`` with what stands under it."""

    registry: str
    name: str
    facts: Mapping[str, Any]
    definition: Definition


@dataclass(frozen=True, slots=True)
class _Written:
    """A default as it is written; its value is only known by running it."""

    expression: ast.expr

    def __repr__(self) -> str:
        return ast.unparse(self.expression)


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    """The signature of a function in a source file, without annotations; its defaults are not evaluated."""
    arguments, kinds = node.args, inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    parameters = [
        kinds(
            each.arg,
            kinds.POSITIONAL_ONLY if index < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=_Written(arguments.defaults[index - first_default]) if index >= first_default else kinds.empty,
        )
        for index, each in enumerate(plain)
    ]
    if arguments.vararg is not None:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        kinds(each.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else _Written(default))
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


@cache
def registrations(file: Path) -> Sequence[Registration]:
    """The registrations at the top level of a file of this package, or of a module that does not change."""
    return tuple(registrations_in(ast.parse(file.read_text(encoding="utf-8"), filename=str(file))))


def registrations_in(tree: ast.Module) -> Iterator[Registration]:
    """The registrations at the top level of a module. A name or fact that is no literal is passed over: only running it tells."""
    for node in tree.body:
        if not isinstance(node, Definition):
            continue
        for decorator in node.decorator_list:
            match decorator:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=registry), attr="register"),
                    args=[ast.Constant(value=str(name))],
                    keywords=keywords,
                ):
                    facts = {each.arg: ast.literal_eval(each.value) for each in keywords if each.arg}
                    yield Registration(registry, name, facts, node)


def describe_source(definition: Definition, facts: F) -> Description[F]:
    """The description of a function, or of a class by its __init__."""
    function: ast.AST = definition
    if isinstance(definition, ast.ClassDef):
        own = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        function = own[0] if own else definition
    text = ast.get_docstring(definition) or ""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Description(facts, summary=_first_paragraph(text))
    arguments, told = function.args, meanings(text)
    inputs = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    settings = {
        keyword.arg: Setting(keyword.arg, type_of(keyword.annotation), _default(default), told.get(keyword.arg, ""))
        for keyword, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    return Description(
        facts,
        tuple(inputs[1:] if isinstance(definition, ast.ClassDef) else inputs),
        settings,
        arguments.kwarg is not None,
        _first_paragraph(text),
        _source(text),
    )


def describe_functions(module: str) -> dict[str, Description[None]]:
    """The functions at the top level of a module, by name."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return {node.name: describe_source(node, None) for node in tree.body if isinstance(node, ast.FunctionDef)}


def describe_object(entry: Any, facts: F) -> Description[F]:
    """The same of a function or class that was registered by running code."""
    text = inspect.getdoc(entry) or ""
    told = meanings(text)
    parameters = inspect.signature(entry).parameters.values()
    settings = {
        each.name: Setting(each.name, _annotation(each), _live_default(each), told.get(each.name, ""))
        for each in parameters
        if each.kind is each.KEYWORD_ONLY
    }
    inputs = tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))
    more = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return Description(facts, inputs, settings, more, _first_paragraph(text), _source(text))


def _default(node: ast.expr | None) -> Any:
    """A default that is no literal counts as null: the function knows it, and the configuration leaves it alone."""
    try:
        return default_of(node)
    except ValueError:
        return None


def _annotation(parameter: inspect.Parameter) -> Any:
    written = parameter.annotation
    if isinstance(written, str):
        return type_of(ast.parse(written, mode="eval").body)
    return Any if written is parameter.empty else written


def _live_default(parameter: inspect.Parameter) -> Any:
    if parameter.default is parameter.empty:
        return REQUIRED
    return list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default


def _first_paragraph(docstring: str) -> str:
    return " ".join(docstring.partition("\n\n")[0].split())


def _source(docstring: str) -> str:
    _, _, text = docstring.partition("Source: ")
    return " ".join(text.partition("\n\n")[0].split())
