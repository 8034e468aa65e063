"""Forms of tool calls: what a family's chat template writes is parsed back, and malformed calls say what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from posttrain.data.templates import render
from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_forms import calls_of, chosen_form, form_of_template, marks_of, schemas_of, text_before_calls
from posttrain.data.turns import TemplateTurns
from posttrain.interfaces.worlds import SampledTurn
from posttrain.registry import TOOL_FORMS
from toy import toy_tokenizer

# The part of each family's published chat template that writes an assistant's calls. The rest is the same for all.
CALLS = {
    "hermes": "<tool_call>\n{{ {'name': f.name, 'arguments': f.arguments} | tojson }}\n</tool_call>",
    "qwen3_coder": (
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
        "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}\n</tool_call>"
    ),
    "seed": (
        "<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>"
        "{{ v | string }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>"  # objects as Python writes them
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<parameter name="{{ k }}">'
        "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>"
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ f.name }}:0<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="{{ f.name }}" index="1"<|sep|>'
        "{% for k, v in f.arguments.items() %}"
        "{% set t = 'string' if v is string else 'null' if v is none else 'boolean' if v is boolean else 'number' if v is number "
        "else 'object' if v is mapping else 'array' %}"
        '<|open|>argument key="{{ k }}" type="{{ t }}"<|sep|>{{ v if v is string else v | tojson }}<|close|>argument<|sep|>'
        "{% endfor %}<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "deepseek": (
        "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments }}"  # a text
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "gemma": (
        '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{% raw %}{{% endraw %}'
        "{% for k, e in v.items() %}{{ k }}:{{ value(e) }}{{ ',' if not loop.last }}{% endfor %}{% raw %}}{% endraw %}"
        "{% elif v is iterable %}[{% for e in v %}{{ value(e) }}{{ ',' if not loop.last }}{% endfor %}]"
        "{% elif v is boolean %}{{ v | tojson }}{% else %}{{ v }}{% endif %}{% endmacro %}"  # None as Python writes it
        "<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>"
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant to=functions.{{ f.name }}<|channel|>commentary "
        "json<|message|>{{ f.arguments | tojson }}<|call|>"
    ),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "number": {"type": "string"},
                "limit": {"type": "integer"},
                "exact": {"type": "boolean"},
                "where": {"type": "object"},
                "tags": {"type": "array"},
                "share": {"type": ["number", "null"]},
            },
        },
    },
}
ARGUMENTS = {
    "query": 'Was ist "1 < 2"?\n  zweite Zeile {x: [y]}',
    "number": "007",
    "limit": 5,
    "exact": True,
    "where": {"from": "a:b, c", "depth": [1, 2.5]},
    "tags": ["x", "y, z"],
    "share": None,
}
K3_CALL = (
    '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument {}<|close|>argument<|sep|><|close|>call<|sep|>'
)
SCHEMAS = schemas_of([TOOL])


def template_of(form: str) -> str:
    """A template that writes messages as tests.toy does, and calls as the family."""
    return (
        "{% for m in messages %}{{ m['role'][0] | upper }}{{ m['content'] }}{% for c in m.tool_calls or [] %}"
        "{% set f = c.function %}"
        + CALLS[form]
        + "{% endfor %}$\n{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )


def written(form: str, arguments: dict[str, Any]) -> str:
    call = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    text = render(toy_tokenizer(template_of(form)), messages, {}, tools=[TOOL], add_generation_prompt=False)
    return text.removeprefix("A").removesuffix("$\n")


@pytest.mark.parametrize("form", TOOL_FORMS.names())
def test_the_template_decides_and_its_calls_are_parsed_back(form: str) -> None:
    assert form_of_template(template_of(form)) == form
    for arguments in (ARGUMENTS, {"query": "x"}, {}):
        [call] = calls_of(form, "I look.\n" + written(form, arguments), SCHEMAS)
        assert (call.name, call.arguments, call.problem) == ("search", arguments, "")


@pytest.mark.parametrize("form", [form for form in TOOL_FORMS.names() if form != "gpt_oss"])
def test_calls_of_several_and_the_text_before_them(form: str) -> None:
    reply = "I look.\n" + written(form, {"query": "a"}) + "\n" + written(form, {"query": "b", "limit": 2})
    found = [call.arguments for call in calls_of(form, reply, SCHEMAS)]
    assert found == [{"query": "a"}, {"query": "b", "limit": 2}]
    assert text_before_calls(form, reply) == "I look.\n"
    assert calls_of(form, "No call: 1 < 2.", SCHEMAS) == []


@pytest.mark.parametrize("form", TOOL_FORMS.names())
def test_tokens_stay_as_sampled_where_the_marks_are_special_tokens(form: str) -> None:
    """The text of a turn keeps the marks, so that its calls are found; the next turn is appended to the tokens as sampled."""
    tokenizer = toy_tokenizer(template_of(form))
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks_of(form))})
    writer = TemplateTurns(tokenizer, {}, form=chosen_form("auto", tokenizer.chat_template))
    sampled = tuple(tokenizer(written(form, ARGUMENTS) + "$")["input_ids"])
    text = writer.text_of(sampled)
    [call] = calls_of(form, text, SCHEMAS)
    assert call.arguments == ARGUMENTS
    asked = [{"role": "user", "content": "Q"}]
    result = {"role": "tool", "content": "R"}
    following, unchanged = writer.follow(asked, SampledTurn(sampled, text, True), [result], [TOOL])
    assert unchanged and following.kept == len(sampled)
    assert tokenizer.decode(following.token_ids) == "\nTR$\nA"
    # Also two turns later, when the calls are history.
    second = tuple(tokenizer("Done.$")["input_ids"])
    history = [*asked, {"role": "assistant", "content": text}, result]
    _, unchanged = writer.follow(history, SampledTurn(second, "Done.", True), [asked[0]], [TOOL])
    assert unchanged


@pytest.mark.parametrize(
    ("form", "reply", "problem"),
    [
        ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', "a tool call is written <function=NAME>"),
        ("qwen3_coder", "<tool_call><function=f>x=1</function></tool_call>", "'x=1' is outside"),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>", "names no function"),
        ("seed", "<seed:tool_call>f(1)", "a tool call is written <function=NAME>"),
        ("minimax", "<minimax:tool_call>f</minimax:tool_call>", 'a tool call is written <invoke name="...">'),
        ("minimax", '<minimax:tool_call><invoke name="f">1</invoke>', "'1' is outside"),
        ("glm", '<tool_call>{"name": "f"}</tool_call>', "begins with the function's name"),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>1</tool_call>", "is not"),
        ("kimi", "<|tool_call_begin|>f{}<|tool_call_end|>", "a tool call is written functions.NAME:0"),
        ("kimi", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{", "the arguments are not JSON"),
        ("kimi", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>[1]", "the arguments must be an object"),
        ("kimi_k3", "<|open|>tools<|sep|>f()<|close|>tools<|sep|>", 'a tool call is written <|open|>call tool="NAME"'),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call index="1"<|sep|>', "names no function"),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f"<|sep|>x=1', "'x=1' is outside"),
        ("kimi_k3", K3_CALL.format('key="a" type="number"<|sep|>five'), "the argument 'a' is not JSON"),
        ("kimi_k3", K3_CALL.format('type="string"<|sep|>five'), "an argument has no key"),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>json<|sep|>[1]', "must be an object"),
        ("deepseek", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "has <｜tool▁sep｜> between"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}", "in a block of ```json"),
        ("deepseek", "<｜DSML｜function_calls>f", "a tool call is written <｜DSML｜invoke"),
        ("gemma", "<|tool_call>f()<tool_call|>", "a tool call is written call:NAME{key:value}"),
        ("gemma", "<|tool_call>call:f{a:}<tool_call|>", "the arguments cannot be read"),
        ("gemma", r"<|tool_call>call:f{\u00009:1}<tool_call|>", "the arguments cannot be read"),
        ("gemma", "<|tool_call>call:f" + "{a:" * 5000 + "1" + "}" * 5000, "the arguments cannot be read"),
        ("gpt_oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{a<|call|>", "are not JSON"),
        ("gpt_oss", "<|channel|>commentary to=functions.<|message|>{}<|call|>", "names no function"),
    ],
)
def test_malformed_calls_say_what_is_wrong(form: str, reply: str, problem: str) -> None:
    [call] = calls_of(form, reply, {})
    assert problem in call.problem


@pytest.mark.parametrize(
    "schema",
    [
        [],
        {"properties": []},
        {"properties": {"k": 5}},
        {"properties": {"k": {"type": 5}}},
        {"properties": {"k": {"type": [5]}}},
    ],
)
def test_a_schema_that_says_nothing_leaves_texts(schema: Any) -> None:
    assert calls_of("glm", written("glm", {"k": "7"}), {"search": schema})[0].arguments == {"k": "7"}


def test_words_about_calls_are_no_form() -> None:
    assert form_of_template("Given the tools, write a function call: a JSON object.") == "hermes"


def test_older_and_newer_ways_of_a_family() -> None:
    v3 = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{"limit": 5}\n```<｜tool▁call▁end｜>'
    v32 = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="limit" string="false">5'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="number" string="true">007</｜DSML｜parameter>\n</｜DSML｜invoke>'
    )
    assert calls_of("deepseek", v3, {}) == [ToolCall(name="search", arguments={"limit": 5})]
    assert calls_of("deepseek", v32, {}) == [ToolCall(name="search", arguments={"limit": 5, "number": "007"})]
    function_gemma = "<start_function_call>call:search{query:<escape>a, b<escape>,limit:5}<end_function_call>"
    assert calls_of("gemma", function_gemma, {})[0].arguments == {"query": "a, b", "limit": 5}
    assert calls_of("kimi", written("kimi", {}), {})[0].call_id == "functions.search:0"
    harmony = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"limit": 5}<|call|>'
    assert calls_of("gpt_oss", harmony, {})[0].arguments == {"limit": 5}
    assert calls_of("gpt_oss", "<|channel|>final<|message|>4<|return|>", {}) == []


def test_kimi_k3_writes_several_calls_of_a_block_and_its_thoughts_before_it() -> None:
    """As published: thoughts that the prompt has opened, the answer, then all calls in one block; attributes are escaped."""
    reply = (
        'I call <|open|>tools<|sep|><|open|>call tool="no"<|sep|><|close|>call<|sep|><|close|>tools<|sep|> soon'
        "<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="a &amp; b" index="1"<|sep|><|open|>argument key="x&quot;y" type="string"<|sep|> 1\n'
        '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="c" index="2"<|sep|><|open|>json type="object"<|sep|>'
        '{"k": [1]}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
    )
    assert calls_of("kimi_k3", reply, {}) == [
        ToolCall(name="a & b", arguments={'x"y': " 1\n"}), ToolCall(name="c", arguments={"k": [1]})
    ]  # fmt: skip


def test_kimi_k2_with_the_singular_name_of_its_section() -> None:
    call = "<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}"
    reply = f"Yes.<|tool_call_section_begin|>{call}<|tool_call_section_end|>"
    assert calls_of("kimi", reply, {}) == [ToolCall(name="f", call_id="functions.f:1")]
    assert text_before_calls("kimi", reply) == "Yes."


def test_calls_in_thoughts_are_not_run() -> None:
    reply = "<think>I could write " + written("glm", {"query": "a"}) + "</think>" + written("glm", {"query": "b"})
    assert [call.arguments for call in calls_of("glm", reply, SCHEMAS)] == [{"query": "b"}]


def test_texts_of_the_wrong_type_reach_the_check_of_the_schema() -> None:
    reply = "<tool_call><function=search><parameter=limit>five</parameter></function></tool_call>"
    assert calls_of("qwen3_coder", reply, SCHEMAS)[0].arguments == {"limit": "five"}
    assert json.dumps(calls_of("glm", written("glm", {"number": "1"}), SCHEMAS)[0].arguments) == '{"number": "1"}'
