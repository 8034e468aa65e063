"""Every value in every place of a request, to a real sampler: an answer or a clear refusal, never a fault of the server's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from posttrain.backends.endpoint.app import Endpoint, EndpointPlan
from posttrain.backends.endpoint.driver import Driver
from posttrain.backends.rollout.native import NativeEngine
from posttrain.config.model import ModelConfig
from posttrain.data.openai_api.own_sampling import DISTRIBUTION, Honours
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.records.trajectories import SamplingParams

pytest.importorskip("llguidance")
SAMPLING = SamplingParams(max_response_tokens=2)
HONOURS = Honours(distributions=DISTRIBUTION, stops=True, seeds=True, tops=True, echoes=True, grammars=True)
MESSAGES = [{"role": "user", "content": "a"}]
VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 1e308, 10**400, "", "x", "\0", [], [[]], [None], {}, {"a": 1}, [{}], "9" * 5000, [1] * 300,
    {"type": "function"}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(a{1,9999}){1,9999}"}}},
]  # fmt: skip
TOP = [
    "messages", "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "n", "stream", "stream_options",
    "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "parallel_tool_calls", "user", "metadata",
    "presence_penalty", "logit_bias", "unknown",
]  # fmt: skip
SCHEMA = ("properties", "required", "type", "additionalProperties", "$ref", "$defs", "anyOf", "enum", "const")


def bodies(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests with the value in one place each."""

    def chat(**more: Any) -> tuple[str, dict[str, Any]]:
        return "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **more}

    def tool(function: dict[str, Any], choice: str = "required") -> tuple[str, dict[str, Any]]:
        return chat(tools=[{"type": "function", "function": function}], tool_choice=choice)

    yield from (chat(**{name: value}) for name in TOP)
    for name in ("role", "content", "tool_calls", "name", "tool_call_id"):
        yield chat(messages=[{"role": "user", "content": "a", name: value}])
        yield chat(messages=[*MESSAGES, {"role": "assistant", "content": "b", name: value}, *MESSAGES])
    yield from (tool({"name": "f", name: value}) for name in ("name", "parameters", "description"))
    for name in SCHEMA:
        yield tool({"name": "f", "parameters": {name: value}})
        yield tool({"name": "f", "parameters": {"properties": {"a": {name: value}}}})
        yield chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object", name: value}}})
    for name in ("prompt", "echo", "logprobs", "suffix", "best_of"):
        yield "/v1/completions", {"prompt": "a", "max_tokens": 2, name: value}
    for name in ("input", "instructions", "tools", "text", "include", "tool_choice", "max_output_tokens", "reasoning"):
        yield "/v1/responses", {"input": "a", "max_output_tokens": 2, name: value}
    for name in ("type", "role", "content", "name", "arguments", "call_id", "output"):
        yield "/v1/responses", {"input": [{"role": "user", "content": "a", name: value}], "max_output_tokens": 2}


@pytest.mark.slow
def test_no_value_anywhere_is_a_fault_of_the_server(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_llama)))
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    engine = NativeEngine(model, tokenizer, max_concurrent_sequences=8, max_prefill_tokens=300)
    driver = Driver(engine, SAMPLING)
    plan = EndpointPlan(
        model="m",
        token="t",
        sampling=SAMPLING,
        max_prompt_tokens=200,
        honours=HONOURS,
        streams=True,
        session_header="X-Session-Id",
        max_sessions=2,
        host_names=frozenset({"here"}),
    )
    app = Endpoint(plan, driver, tokenizer, {}, None).app()
    driver.start()

    async def sweep() -> list[tuple[int, str, str]]:
        found = []
        headers = {"Authorization": "Bearer t", "X-Session-Id": "s"}
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app), base_url="http://here", timeout=120
        ) as client:
            for path, body in (each for value in VALUES for each in bodies(value)):
                answer = await client.post(path, content=json.dumps(body).encode(), headers=headers)
                found.append((answer.status_code, f"{path} {json.dumps(body)[:300]}", answer.text[:300]))
            # The server goes on.
            answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 200
        return found

    try:
        told = asyncio.run(sweep())
    finally:
        driver.close()
    assert [each for each in told if each[0] not in (200, 400, 404)] == []
    # Both kinds are there, and every refusal says why.
    assert {status for status, _, _ in told} == {200, 400, 404}
    assert all(json.loads(text)["error"]["message"] for status, _, text in told if status != 200 and len(text) < 300)


def test_a_grammar_that_cannot_be_followed_is_the_requests_fault(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_llama)))
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    driver = Driver(NativeEngine(model, tokenizer, max_concurrent_sequences=8, max_prefill_tokens=300), SAMPLING)
    plan = EndpointPlan(
        model="m",
        token="t",
        sampling=SAMPLING,
        max_prompt_tokens=200,
        honours=HONOURS,
        session_header="X-Session-Id",
        max_sessions=2,
        host_names=frozenset({"here"}),
    )
    app = Endpoint(plan, driver, tokenizer, {}, None).app()
    driver.start()

    async def ask() -> httpx2.Response:
        schema = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
        body = {"messages": MESSAGES, "response_format": schema}
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://here") as client:
            return await client.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer t"})

    try:
        answer = asyncio.run(ask())
    finally:
        driver.close()
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message) == (400, "its grammar cannot be followed: NoExtensionBias")
