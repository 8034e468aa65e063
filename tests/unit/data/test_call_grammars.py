"""Answers that must call a tool: every text of a form's grammar is a valid call, and nothing else is in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from posttrain.data.chat_api import Refused
from posttrain.data.openai_api.own_sampling import Honours
from posttrain.data.openai_api.request import read
from posttrain.data.responses_api import as_chat
from posttrain.data.tool_calls import argument_problem
from posttrain.data.tool_forms import calls_grammar_of, calls_of, marks_of, schemas_of
from posttrain.libraries.grammars import BadGrammar, Grammars
from posttrain.records.trajectories import SamplingParams
from posttrain.registry import TOOL_FORMS
from toy import toy_tokenizer

pytest.importorskip("llguidance")
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "maxLength": 12},
                "limit": {"type": "integer", "minimum": 0, "maximum": 9},
                "size": {"type": "string", "enum": ["S", "XL"]},
                "exact": {"type": "boolean"},
                "where": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "integer", "minimum": 0, "maximum": 5},
                        "b": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
                    },
                    "required": ["a"],
                    "additionalProperties": False,
                },
            },
            "required": ["size", "where", "query"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
SAMPLING = SamplingParams(max_response_tokens=16)
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def drawn(grammars: Grammars, grammar: str, draws: np.random.Generator, end: int) -> list[int]:
    """Draw evenly among the tokens that are allowed, those of control characters and parts of characters last."""
    place, found = grammars.begin(grammar), []
    while True:
        allowed = np.flatnonzero(place.allowed())
        plain = [token for token in allowed if 32 <= token < 127 or token > 255]
        token = int(draws.choice(plain or allowed))
        if token == end:
            return found
        assert len(found) < 4000, "the grammar has no end"
        place.take(token)
        found.append(token)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", TOOL_FORMS.names())
def test_every_text_within_the_grammar_is_a_valid_call(form: str, special: bool) -> None:
    tokenizer = toy_tokenizer()
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(marks_of(form))})
    end = tokenizer.eos_token_id
    grammars = Grammars(tokenizer, len(tokenizer), {end})
    draws = np.random.default_rng(0)
    names: set[str] = set()
    for tools, several in (([SEARCH], False), ([SEARCH, NOW], True)):
        grammar = calls_grammar_of(form, tools, several=several)
        for _ in range(12 if several else 3):
            text = str(tokenizer.decode(drawn(grammars, grammar, draws, end), skip_special_tokens=False))
            calls, schemas = calls_of(form, text, schemas_of(tools)), schemas_of(tools)
            assert calls and (several or len(calls) == 1), text
            for call in calls:
                assert (call.problem, argument_problem(call.arguments, schemas[call.name])) == ("", ""), text
                names.add(call.name)
                if call.name == "search":
                    assert call.arguments["size"] in ("S", "XL") and call.arguments["where"]["a"] in range(6)
    assert names == {"search", "now"}


def test_marks_are_the_tokens_of_the_tokenizer_that_stand_for_them() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<start_function_call>", "<end_function_call>", "<escape>"]}
    )
    grammars = Grammars(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    place = grammars.begin(calls_grammar_of("gemma", [SEARCH], several=False))
    assert np.flatnonzero(place.allowed()).tolist() == [tokenizer.convert_tokens_to_ids("<start_function_call>")]


@pytest.mark.parametrize(
    ("form", "parameters", "problem"),
    [
        ("hermes", {"properties": {"a": {"type": "string", "pattern": "a(?=b)"}}}, "look-around"),
        ("hermes", {"properties": {"a": {"type": "string"}}, "required": ["b"]}, "required"),
        ("glm", {"properties": {"a": {"type": "string", "pattern": "a"}}}, "of type string has pattern"),
        ("glm", {"properties": {"a b": {"type": "string"}}}, 'a parameter is named "a b"'),
        ("seed", {"properties": {}, "required": ["b"]}, 'requires "b", which is none of its properties'),
        ("gemma", {"properties": {"a": {"type": "object"}}}, 'a parameter of type "object" has no grammar'),
        ("gemma", {"properties": {"a": {"type": "array", "uniqueItems": True}}}, "of type array has uniqueItems"),
    ],
)
def test_a_schema_without_a_grammar_is_named(form: str, parameters: dict[str, Any], problem: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(BadGrammar, match=problem):
        calls_grammar_of(form, [tool], several=False)


def asked(**more: Any) -> str:
    return read(HELLO | more, SAMPLING, chat=True, honours=Honours(grammars=True)).grammar


def test_the_choice_of_a_request() -> None:
    tools = [SEARCH, NOW]
    named = {"type": "function", "function": {"name": "now"}}
    assert asked(tools=tools) == asked(tools=tools, tool_choice="none") == ""
    assert asked(tools=tools, tool_choice=named) == calls_grammar_of("hermes", [NOW], several=False)
    assert asked(tools=tools, tool_choice="required") == calls_grammar_of("hermes", tools, several=True)
    one = asked(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert one == calls_grammar_of("hermes", tools, several=False)
    # As the responses API has it
    body = as_chat(
        {
            "input": "hello",
            "tools": [{"type": "function", "name": "now"}],
            "tool_choice": {"type": "function", "name": "now"},
        }
    )
    assert read(body, SAMPLING, chat=True, honours=Honours(grammars=True)).grammar


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"tool_choice": "required"}, "and there are no tools"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, 'and the tools are "now"'),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice is .*; use auto"),
        ({"tools": [NOW], "tool_choice": 5}, "tool_choice is 5; use auto"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "required"}, 'is named "a b"'),
        (
            {"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "whose calls it would exclude",
        ),
    ],
)
def test_choices_that_are_refused(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        asked(**more)


def test_a_sampler_without_grammars_says_so() -> None:
    with pytest.raises(Refused, match='tool_choice is "required", which is for samplers'):
        read(HELLO | {"tools": [NOW], "tool_choice": "required"}, SAMPLING, chat=True, honours=Honours())
