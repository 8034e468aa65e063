"""Responses within a grammar, and log-probs of the distribution that is left."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.backends.rollout.native import NativeEngine
from posttrain.data.openai_api.answer import answer
from posttrain.data.openai_api.answer_format import grammar_of
from posttrain.data.openai_api.own_sampling import Honours
from posttrain.data.openai_api.request import read
from posttrain.interfaces.rollout_engine import Request
from posttrain.libraries.grammars import BadGrammar, json_grammar
from posttrain.models.loading import load_causal_lm
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "yes": {"type": "boolean"},
        "size": {"enum": ["S", "XL", "é🙂"]},
        "count": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["yes", "size", "count"],
    "additionalProperties": False,
}


def sampled(folder: Path, requests: list[Request], temperature: float = 1.0) -> dict[str, Trajectory]:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    engine = NativeEngine(
        model, AutoTokenizer.from_pretrained(folder), max_concurrent_sequences=8, max_prefill_tokens=300
    )
    found = []
    with engine.open_stream(SamplingParams(max_response_tokens=64, temperature=temperature)) as stream:
        stream.submit(requests)
        while ended := stream.wait(60.0):
            found += ended
    return {each.sample_id: each for each in found}


def test_an_untrained_model_writes_what_the_schema_allows(tiny_llama: Path) -> None:
    grammar = json_grammar(SCHEMA)
    asked = [Request(str(number), tuple(b"some text"), 256, seed=number, grammar=grammar) for number in range(6)]
    for each in sampled(tiny_llama, asked).values():
        assert each.stop_reason is StopReason.EOS, each.text
        found = json.loads(each.text)
        assert list(found) == ["yes", "size", "count"] and found["yes"] in (True, False)
        assert found["size"] in ("S", "XL", "é🙂") and 0 <= found["count"] <= 9


def test_an_untrained_model_calls_the_tool_that_the_request_names(tiny_llama: Path) -> None:
    properties = {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
    parameters = {"type": "object", "properties": properties, "required": ["city", "days"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("weather", "map")]
    choice = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choice}
    asked = read(body, SamplingParams(max_response_tokens=512), chat=True, honours=Honours(grammars=True))
    found = sampled(tiny_llama, [Request("x", tuple(b"some text"), asked.max_tokens, grammar=asked.grammar)])["x"]
    [choice_made] = answer("a", "m", 0, asked, 9, [found])["choices"]
    assert choice_made["finish_reason"] == "tool_calls" and choice_made["message"]["content"] is None
    [call] = choice_made["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "weather" and arguments["city"] in ("Rome", "Oslo")
    assert arguments["days"] in range(1, 10)


def test_log_probs_are_those_of_the_tokens_that_are_left_and_others_are_sampled_beside(tiny_llama: Path) -> None:
    grammar, prompt = json_grammar({"const": "ab"}), tuple(b"text")
    asked = [Request("within", prompt, 8, grammar=grammar), Request("free", prompt, 8)]
    both, alone = sampled(tiny_llama, asked), sampled(tiny_llama, asked[1:])
    assert both["free"].token_ids == alone["free"].token_ids
    assert bytes(both["within"].token_ids[:4]) == b'"ab"'
    # One token is possible at each place, so each has probability 1, whatever the model thinks of it.
    assert both["within"].logprobs == pytest.approx([0.0] * len(both["within"].token_ids), abs=1e-6)


def test_two_possible_tokens_have_the_models_odds(tiny_llama: Path) -> None:
    prompt = tuple(b"text")
    found = sampled(tiny_llama, [Request("x", prompt, 4, grammar=json_grammar({"enum": [1, 2]}), top_logprobs=5)])["x"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)(torch.tensor([prompt])).logits
    expected = dict(zip(b"12", logits[0, -1, list(b"12")].log_softmax(dim=0).tolist(), strict=True))
    assert dict(found.top_logprobs[0]) == pytest.approx(expected, abs=1e-4)
    assert found.logprobs[0] == pytest.approx(expected[found.token_ids[0]], abs=1e-4)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "text"}, "Invalid type"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),  # it would have no effect
        ({"$ref": "#/nowhere"}, "nowhere"),
    ],
)
def test_schemas_that_cannot_be_honoured(schema: dict[str, object], why: str) -> None:
    with pytest.raises(BadGrammar, match=why):
        json_grammar(schema)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert why in grammar_of({"response_format": form}, Honours(grammars=True))[1]


@pytest.mark.parametrize(
    ("body", "grammars", "why"),
    [
        ({"response_format": "json"}, True, "use .*json_object"),
        ({"response_format": {"type": "json_schema"}}, True, "without a schema"),
        ({"response_format": {"type": "json_object"}}, False, "rollout.engine native"),
        ({"response_format": {"type": "json_object"}, "tools": [{"type": "function"}]}, True, "tools are offered"),
    ],
)
def test_formats_that_are_refused(body: dict[str, object], grammars: bool, why: str) -> None:
    assert re.search(why, grammar_of(body, Honours(grammars=grammars))[1])
    assert grammar_of({"response_format": {"type": "text"}}, Honours(grammars=False)) == ("", "")
