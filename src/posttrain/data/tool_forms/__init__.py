"""Forms in which models write tool calls, one file per family: each parses the calls of a reply.

A form is chosen by ``environment.tool_call_form``, or by the chat template: the form whose marks are all in it, the most
specific one first. The marks of some families are special tokens; a reply is decoded with those of its form.
Facts about the families come from their published chat templates and model cards.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms.grammar import CallSyntax, calls_grammar
from posttrain.libraries.grammars import check_grammar
from posttrain.registry import TOOL_FORMS

AUTO = "auto"
DEFAULT = "hermes"  # of templates that show no other
# Parameters of the tools that are offered, a JSON schema each, by the tool's name.
Schemas = Mapping[str, Mapping[str, Any]]


def form_of_template(template: str) -> str:
    """Return the name of the form that a chat template writes."""
    marks = {name: TOOL_FORMS.facts(name).in_template for name in TOOL_FORMS.names()}
    found = [name for name, words in marks.items() if all(word in template for word in words)]
    return max(found, key=lambda name: (len(marks[name]), name), default=DEFAULT)


def chosen_form(asked: str, template: object) -> str:
    """Return the form of a configuration; ``auto`` is decided by the chat template (a text, or several by name)."""
    if asked != AUTO:
        return asked
    texts = template.values() if isinstance(template, Mapping) else [template]
    return form_of_template("\n".join(text for text in texts if isinstance(text, str)))


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the parameters of tools that are written as chat templates take them."""
    functions = [tool.get("function", tool) for tool in tools]
    found = [each for each in functions if isinstance(each, Mapping) and isinstance(each.get("name"), str)]
    return {each["name"]: each.get("parameters") or {} for each in found}


def calls_of(form: str, reply: str, schemas: Schemas) -> list[ToolCall]:
    """Parse all calls of a reply, in order; a malformed one gets its problem. Raises: UnknownName."""
    calls: list[ToolCall] = TOOL_FORMS.get(form)(reply, schemas)
    return calls


def calls_grammar_of(form: str, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """Return the grammar of replies that call one of the tools, or with ``several`` some of them (libraries.grammars).

    Raises: BadGrammar with the reason where there is none; MissingDependency; UnknownName.
    """
    syntax: CallSyntax = sys.modules[TOOL_FORMS.get(form).__module__].SYNTAX
    grammar = calls_grammar(syntax, schemas_of(tools), several=several)
    check_grammar(grammar)
    return grammar


def marks_of(form: str) -> tuple[str, ...]:
    """Return the texts of the form that may be special tokens of a tokenizer."""
    marks: tuple[str, ...] = TOOL_FORMS.facts(form).marks
    return marks


def openings_of(form: str) -> tuple[str, ...]:
    """Return the texts with which a call begins."""
    opening: tuple[str, ...] = TOOL_FORMS.facts(form).opening
    return opening


def text_before_calls(form: str, reply: str) -> str:
    """Return the part of a reply before its first call."""
    places = [place for mark in openings_of(form) if (place := reply.find(mark)) >= 0]
    return reply[: min(places)] if places else reply


def without_marks(form: str, reply: str) -> str:
    """Return a reply without calls as plain text: what follows the last mark, which is its final message."""
    end = max((reply.rfind(mark) + len(mark) for mark in marks_of(form) if mark in reply), default=0)
    return reply[end:]
