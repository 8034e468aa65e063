"""Tool calls in a reply, well written or not."""

from __future__ import annotations

import pytest

from posttrain.data.tool_calls import ToolCall, argument_problem
from posttrain.data.tool_forms import calls_of


def test_several_calls_in_order() -> None:
    reply = (
        'First.\n<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call> and '
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "sql", "arguments": "{\\"query\\": \\"b\\"}"}</tool_call>'
    )
    assert calls_of("hermes", reply, {}) == [
        ToolCall(name="search", arguments={"query": "a"}),
        ToolCall(name="now"),
        ToolCall(name="sql", arguments={"query": "b"}),
    ]
    assert calls_of("hermes", "The answer is 4. </tool_call>", {}) == []


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ('{"name": "search"', "the tool call is not JSON: Expecting"),
        ("[" * 100_000, "the tool call is not JSON: "),
        ("", "the tool call is not JSON: "),
        ("[1]", "a tool call is written"),
        ('{"name": 5}', "a tool call is written"),
        ('{"name": "a", "arguments": [1]}', "the arguments must be an object"),
        ('{"name": "a", "arguments": "{"}', "the arguments are not JSON"),
    ],
)
def test_malformed_calls_say_what_is_wrong(inside: str, problem: str) -> None:
    for reply in (f"<tool_call>{inside}</tool_call>", f"<tool_call>{inside}"):  # also where the model was cut
        [call] = calls_of("hermes", reply, {})
        assert call.problem.startswith(problem)


SCHEMA = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "k": {"type": "integer"}, "x": {"type": ["number", "null"]}, "any": {}},
    "required": ["query"],
}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": "a", "k": 3, "x": None, "any": [1]}, ""),
        ({"query": "a", "x": 2}, ""),
        ({"k": 3}, "the argument 'query' is missing"),
        ({"query": 5}, "the argument 'query' must be of type string, not 5"),
        ({"query": "a", "k": True}, "the argument 'k' must be of type integer, not true"),
        ({"query": "a", "x": "2"}, "the argument 'x' must be of type number or null, not \"2\""),
        ({"query": "a", "n": 1}, "there is no argument 'n' (known: query, k, x, any)"),
    ],
)
def test_arguments_are_held_against_the_schema(arguments: dict[str, object], problem: str) -> None:
    assert argument_problem(arguments, SCHEMA) == problem


def test_a_schema_may_be_open() -> None:
    assert argument_problem({"n": 1}, {"properties": {}, "additionalProperties": True}) == ""


def test_half_a_character_in_a_call_is_replaced() -> None:
    """A model may write the escape of one half of a pair, which no tool can encode."""
    [call] = calls_of(
        "hermes",
        '<tool_call>{"name": "sq\\ud83d", "arguments": {"query": "a\\ud83d", "\\udc00": ["\\ud83d\\ude00"]}}</tool_call>',
        {},
    )
    assert call.name == "sq\ufffd"
    assert call.arguments == {"query": "a\ufffd", "\ufffd": ["\U0001f600"]}
    [call] = calls_of("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud83d\\"}"}</tool_call>', {})
    assert call.arguments == {"a": "\ufffd"}
