"""Grammars of tool calls: the texts of a family's form that are a valid call of a tool, for samplers that keep within a grammar.

Rules are in Lark's notation as llguidance reads it (``libraries.grammars``). A form's file gives its ``CallSyntax``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.tool_forms.values import kinds_of
from posttrain.libraries.grammars import SPACE, BadGrammar, literal, marked

Schema = Mapping[str, Any]
MOST_CALLS = 16  # of an answer
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")  # of a function or parameter: it has no meaning in any form
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")  # in patterns
# Keywords that allow no other values.
_NOTES = frozenset({
    "type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$defs",
    "definitions", "$schema", "$id", "strict",
})  # fmt: skip


@dataclass(slots=True)
class Rules:
    """The rules of one grammar, by name, beside its first."""

    by_name: dict[str, str] = field(default_factory=dict)

    def text(self, *excluded: str, least: int = 0, most: int | None = None) -> str:
        """Return an expression for any text that holds none of ``excluded``, of ``least`` to ``most`` characters."""
        count = f"{{{least},{'' if most is None else most}}}"
        found = rf"/(.|\n){count}/"
        if excluded:
            barred = "|".join(_SPECIAL.sub(r"\\\g<0>", one) for one in excluded)
            found += rf" & ~/(.|\n)*({barred})(.|\n)*/"
        return self._named("TEXT", found)

    def rule(self, body: str) -> str:
        """Return the name of a rule."""
        return self._named("part", body)

    def _named(self, kind: str, body: str) -> str:
        for name, known in self.by_name.items():
            if known == body and name.startswith(kind):
                return name
        name = f"{kind}_{len(self.by_name)}"
        self.by_name[name] = body
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Expressions of a grammar for the calls of a form; "" for nothing."""

    call: Callable[[Rules, str, Schema], str]  # of a function's name and its parameters, an object's schema
    before: str = ""  # all calls of a message
    between: str = ""
    after: str = ""
    several: bool = True  # in one message


def calls_grammar(syntax: CallSyntax, schemas: Mapping[str, Schema], *, several: bool) -> str:
    """Return the grammar of messages that call one of these functions, or with ``several`` up to MOST_CALLS of them.

    Args: schemas, the parameters of each function by its name.
    Raises: BadGrammar with the reason, where a form or a schema has no such grammar.
    """
    rules = Rules()
    calls = [syntax.call(rules, _checked("function", name), closed(schema)) for name, schema in schemas.items()]
    one = rules.rule(" | ".join(calls))
    more = f" ({syntax.between} {one}){{0,{MOST_CALLS - 1}}}" if several and syntax.several else ""
    start = f"start: {syntax.before} {one}{more} {syntax.after}"
    return "\n".join(["%llguidance {}", start, *(f"{name}: {body}" for name, body in rules.by_name.items())]) + "\n"


def closed(schema: Schema) -> Schema:
    """Return the schema of a function's parameters as one of an object, without further names unless it allows them."""
    return {"properties": {}, "additionalProperties": False, **schema, "type": "object"}


def json_value(schema: object) -> str:
    """Return an expression for the JSON texts that a schema allows."""
    found = schema if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps({**found, 'x-guidance': {'whitespace_pattern': SPACE}})}"


def json_of(before: str, after: str) -> Callable[[Rules, str, Schema], str]:
    """Return the syntax of a call whose arguments are one JSON object. Args: both texts around it, in which {name} is replaced;
    parts between « and » are marks, which may be tokens."""

    def call(rules: Rules, name: str, schema: Schema) -> str:
        return f"{texts(before.replace('{name}', name))} {json_value(schema)} {texts(after)}"

    return call


def texts(written: str) -> str:
    """Return an expression for a text in which parts between « and » are marks."""
    parts = re.split("«(.*?)»", written)
    found = [marked(part) if place % 2 else literal(part) for place, part in enumerate(parts) if part]
    return " ".join(found)


def tagged(
    function: tuple[str, str],
    parameter: tuple[str, str],
    *,
    ends: Sequence[str],
    types: Mapping[str, str] | None = None,
) -> Callable[[Rules, str, Schema], str]:
    """Return the syntax of a call with a tag for each argument: a text as it is, any other value as JSON.

    Args: the texts around a function and around an argument, in which {name} is replaced, and {type} by that of ``types``;
        ends, texts that none of the arguments may hold.
    """

    def call(rules: Rules, name: str, schema: Schema) -> str:
        def argument(key: str) -> str:
            value, kind = _plain_value(rules, key, schema, ends)
            opening = parameter[0].replace("{name}", key).replace("{type}", kind)
            return f"{texts(opening)} {value} {texts(parameter[1])}"

        return f"{texts(function[0].replace('{name}', name))} {_members(schema, argument, '')} {texts(function[1])}"

    return call


def bare_object(rules: Rules, schema: Schema, value: Callable[[Rules, Any], str]) -> str:
    """Return an expression for an object with bare keys, ``{key:value,...}``. Args: value, of an expression for a schema."""

    def member(key: str) -> str:
        return f"{literal(key + ':')} {value(rules, with_definitions(schema, key))}"

    return f"{literal('{')} {_members(schema, member, literal(','))} {literal('}')}"


def with_definitions(schema: Schema, key: str) -> Schema:
    """Return the schema of a parameter, with the definitions that it may refer to."""
    found = schema["properties"][key]
    kept = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {**kept, **found} if isinstance(found, Mapping) else kept


def _members(schema: Schema, member: Callable[[str], str], separator: str) -> str:
    """Return an expression for the members of an object in the order of its schema, of which optional ones may be missing."""
    properties, required = schema["properties"], schema.get("required") or ()
    if not isinstance(properties, Mapping) or not isinstance(required, (list, tuple)):
        raise BadGrammar("parameters has properties that are no object, or a required that is no list")
    if missing := [name for name in required if name not in properties]:
        raise BadGrammar(f"parameters requires {json.dumps(missing[0])[:60]}, which is none of its properties")
    names = [_checked("parameter", name) for name in properties]
    if not separator:
        return " ".join(member(name) if name in required else f"({member(name)})?" for name in names)
    return _separated([(member(name), name in required) for name in names], separator)


def _separated(members: Sequence[tuple[str, bool]], separator: str) -> str:
    """Return an expression for members with a separator between those that are there. Args: each with True where it must be."""
    following = ""  # members that follow another one
    begins = ""  # members of which the first one has none before it
    for member, needed in reversed(members):
        head = f"{member} {following}".strip()
        begins = f"({head})" if needed else f"({head} | {begins})" if begins else f"({head})?"
        following = f"{separator} {member} {following}" if needed else f"({separator} {member})? {following}"
    return begins


def _plain_value(rules: Rules, key: str, schema: Schema, ends: Sequence[str]) -> tuple[str, str]:
    """Return an expression for an argument that is written as plain text, and the name of its type."""
    found = with_definitions(schema, key)
    kinds = kinds_of(schema, key)
    if "string" not in kinds:
        return json_value(found), kinds[0]
    allowed = [found["const"]] if "const" in found else found.get("enum")
    if isinstance(allowed, list) and all(isinstance(each, str) for each in allowed) and allowed:
        return f"({' | '.join(literal(each) for each in allowed)})", "string"
    return rules.text(*ends, **bounds(found, "minLength", "maxLength")), "string"


def bounds(schema: Schema, least: str, most: str, *further: str) -> dict[str, Any]:
    """Return the bounds that two keywords of a schema give. Args: further, other keywords that the caller reads.

    Raises: BadGrammar for values that are no counts, and for any keyword that would have no effect.
    """
    kind = schema.get("type", "string")
    if other := sorted(set(schema) - _NOTES - {least, most, *further}):
        raise BadGrammar(f"a parameter of type {kind} has {other[0]}, which this model's form of calls cannot keep")
    found = {"least": schema.get(least, 0), "most": schema.get(most)}
    if not all(each is None or (type(each) is int and each >= 0) for each in found.values()) or found["least"] is None:
        raise BadGrammar(f"{least} and {most} must be whole numbers")
    return found


def _checked(what: str, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadGrammar(f"a {what} is named {json.dumps(name)[:60]}; use letters, digits, _, . and -")
    return name
